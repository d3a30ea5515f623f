"""The joint graph of a workload's step at its full size, traced on tensors without data."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.lowering  # its decompositions ask it
from torch import fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from benchmarks.harness.workloads import workload_named
from benchmarks.models.workload import Workload
from vdnn.integrations.compile_options import RegionCuts


class _Traced(Exception):
    """Ends a trace: the graph is all that is asked for."""


class Step(nn.Module):
    """The model and its loss in one region."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model, self.loss = workload.model, workload.loss

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model(*inputs))


def cuts_of(name: str) -> RegionCuts:
    """The cuts of the whole step of a workload."""
    spec = workload_named(name)
    found: list[RegionCuts] = []

    def partition(gm: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        found.append(RegionCuts(gm, joint_inputs, num_fwd_outputs, options))
        raise _Traced

    def never(gm: fx.GraphModule, example_inputs: Any) -> Any:
        raise _Traced

    with FakeTensorMode(allow_non_fake_inputs=True):
        workload, _ = spec.make_at(None, is_tiny=False)
        module = Step(workload)
        state = {**dict(module.named_parameters(remove_duplicate=True)), **dict(module.named_buffers())}

        loss: Any = workload.loss
        targets = getattr(loss, "targets", None)

        def forward(state: dict[str, torch.Tensor], targets: torch.Tensor, *inputs: torch.Tensor) -> Any:
            loss.targets = targets  # an input of the graph: a constant may not be without data
            return functional_call(module, state, inputs)

        table = select_decomp_table()
        step: Any = aot_function(
            forward,
            fw_compiler=never,
            bw_compiler=never,
            partition_fn=partition,
            decompositions=table,
            num_params_buffers=len(state),
        )
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=spec.autocast):
                step(state, targets, *workload.inputs)
        except _Traced:
            pass
    return found[0]
