"""compile_options: options by which torch.compile keeps what a region saves under a budget.

Hooks on saved tensors cannot help a model that is compiled as a whole, because backward asks for all of them at once.
So the plan is in the graph: a partitioner decides what forward saves, what backward recomputes, and what is offloaded
between the two. Torch's own cut is taken wherever it fits the budget; otherwise the plan with the shortest step on the
hardware given.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

import vdnn
from vdnn.bytesize import format_bytes, parse_bytes
from vdnn.errors import CombinationError, InvalidArgumentError
from vdnn.hardware import HardwareProfile, load_profile
from vdnn.integrations.compiled_moves import put_into
from vdnn.integrations.region_cuts import RegionCuts, least_of, plans_of
from vdnn.integrations.region_plan import RegionPlanner
from vdnn.runtime.torch_internals import joint_graph

_OPTION = "custom_partitioner_fn"


def compile_options(
    budget: int | str,
    hardware: str | Path | HardwareProfile | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    offload: bool = True,
) -> dict[str, Any]:
    """Options for torch.compile under which a region holds at most `budget` of inputs, outputs and saved values.

    Example::

        model = torch.compile(model, options=vdnn.compile_options(budget="12GiB"))

    A region is a graph that torch compiles; each has the whole budget for itself. Its inputs (parameters among them)
    and outputs count, and what is saved for backward and on the device, each storage once. Gradients and the memory
    that a kernel needs while it runs do not. What does not fit is recomputed in backward, or offloaded to pinned memory
    and reloaded ahead of its use, whichever takes less time. Gradients are those of torch.compile without these
    options, but for the last bits where Inductor fuses recomputed operations with others. Needs torch 2.13.

    Args:
        budget: bytes, or a text such as "12GiB".
        hardware: the card whose times decide what is recomputed or offloaded: the name of a profile, its file, or a
            profile. By default this machine's card is measured.
        options: other options of Inductor, passed on.
        offload: False recomputes, and offloads nothing.

    Raises:
        CombinationError: these options are given twice, or another partitioner is set.
        TorchMissingError: this torch lacks what is needed.
        InvalidArgumentError: the budget is not a size. Also while torch compiles, if no choice fits the budget, and a
            CombinationError if something would be offloaded under CUDA graphs: torch wraps both in its
            BackendCompilerFailed.
    """
    joint_graph.require_partitioner()
    others = dict(options or {})
    _check_alone(others)
    return {**others, _OPTION: BudgetPartitioner(_budget_bytes(budget), _profile(hardware), offloads=offload)}


@dataclass(frozen=True, slots=True)
class RegionChoice:
    """The choice for one region. `by` says whose cut it is: "min-cut" is torch's own. `saved_bytes` stay on the device
    between forward and backward, `offloaded_bytes` do not. `peak_bytes` is the most that is held at a time, and
    `step_ns` the predicted time of forward and backward.
    """

    name: str
    by: str
    inputs_and_outputs_bytes: int
    saved_bytes: int
    min_cut_saved_bytes: int
    recompute_ns: int
    offloaded_bytes: int
    step_ns: int
    peak_bytes: int


class BudgetPartitioner(joint_graph.Partitioner):
    """Cuts joint graphs under a budget. `regions` lists the choices of this process, those from torch's caches aside.

    Inductor takes it as an option, and the backends of torch's `aot_autograd(partition_fn=...)` as their function.
    """

    def __init__(self, budget_bytes: int, profile: HardwareProfile, *, offloads: bool = True) -> None:
        self.budget_bytes, self._offloads = budget_bytes, offloads
        self.regions: list[RegionChoice] = []
        self._profile = profile

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        cuts = RegionCuts(gm, joint_inputs, kwargs.pop("num_fwd_outputs"), kwargs)
        planner = RegionPlanner(self.budget_bytes, self._profile, offloads=self._offloads)
        plans = plans_of(cuts, planner)
        if not plans:
            raise self._refusal(least_of(cuts, planner))
        by = min(plans, key=lambda name: plans[name].step_ns)
        plan, plain = plans[by], cuts.plain.held.saved_bytes
        if plan.moves:
            self._refuse_cuda_graphs()
            put_into(plan.cut.forward, plan.cut.backward, plan.step, plan.moves)
        held = plan.cut.held
        self.regions.append(
            RegionChoice(
                joint_graph.region_name(),
                by,
                held.inputs_and_outputs_bytes,
                held.saved_bytes - plan.offloaded_bytes,
                plain,
                planner.recompute_ns(plan.cut),
                plan.offloaded_bytes,
                plan.step_ns,
                plan.peak_bytes,
            )
        )
        return plan.cut.forward, plan.cut.backward

    def uuid(self) -> bytes:
        """Differs with this package, the budget and the figures of the hardware: torch caches compiled graphs by it."""
        package = Path(vdnn.__file__).parent
        text = repr((hash_of_code(package), torch.__version__, self.budget_bytes, self._profile, self._offloads))
        return hashlib.sha256(text.encode()).digest()

    def _refusal(self, least: tuple[int, int]) -> InvalidArgumentError:
        total, ends = map(format_bytes, least)
        return InvalidArgumentError(
            argument="budget",
            expected=f"at least {total} ({least[0]} bytes), which the compiled region "
            f"{joint_graph.region_name()} holds between forward and backward, {ends} of them its inputs and outputs",
            got=f"{format_bytes(self.budget_bytes)}. Raise the budget, or make the batch smaller",
        )

    def _refuse_cuda_graphs(self) -> None:
        if joint_graph.captures_cuda_graphs():
            raise CombinationError(
                ours="vdnn.compile_options",
                theirs="the CUDA graphs of torch.compile",
                reason="under this budget values are offloaded, and a captured graph cannot move them",
                way_out="Compile without CUDA graphs, set offload=False, or raise the budget",
            )


@functools.cache
def hash_of_code(package: Path) -> str:
    """Differs with every line of the package and its native core: each may change a cut, whatever its version."""
    found = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.glob("_C.*")]):
        code = path.read_bytes()
        found.update(f"{path.relative_to(package)} {len(code)} ".encode() + code)
    return found.hexdigest()


def _budget_bytes(budget: int | str) -> int:
    size: object = parse_bytes(budget) if isinstance(budget, str) else budget
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise InvalidArgumentError(argument="budget", expected='bytes or a text such as "12GiB"', got=repr(budget))
    return size


def _profile(hardware: str | Path | HardwareProfile | None) -> HardwareProfile:
    if isinstance(hardware, HardwareProfile):
        return hardware
    if hardware is not None:
        return load_profile(hardware)
    if not torch.cuda.is_available():
        expected = "the name of a profile on a machine without a card, as in hardware='h100'"
        raise InvalidArgumentError(argument="hardware", expected=expected, got="None")
    from vdnn.runtime.machine.measured_hardware import measured_profile

    return measured_profile()


def _check_alone(options: Mapping[str, Any]) -> None:
    given = options.get(_OPTION)
    if isinstance(given, BudgetPartitioner):
        raise CombinationError(
            ours="vdnn.compile_options",
            theirs="options that it made",
            reason="a region has one budget",
            way_out="Call it once, with the other options as options=",
        )
    setting = f"options[{_OPTION!r}]" if given is not None else joint_graph.other_partitioner()
    if setting:
        raise CombinationError(
            ours="vdnn.compile_options",
            theirs=setting,
            reason="both decide what forward saves",
            way_out="Remove one of them",
        )
