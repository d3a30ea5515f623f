"""One compiled step on the CPU: its loss, buffers and gradients, and the bytes that it saves on the device.

What is saved is read off the autograd graph. Storages that a region was given or returned are not saved in addition:
they are read off the calls of the regions, because a program may give a region tensors that no module owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._dynamo import lookup_backend
from torch._dynamo.backends.common import aot_autograd
from torch.utils._pytree import tree_leaves

from vdnn.integrations.compile_options import BudgetPartitioner
from vdnn.runtime.storage import graph_copies

# (the graph of a region, its example inputs) -> the compiled region
Backend = Callable[[fx.GraphModule, Any], Callable[..., Any]]

_SEED = 3


class Run(NamedTuple):
    """A step: its loss, buffers and gradients, the bytes that were saved on the device, how many regions ran, and the
    bytes that these were given and returned."""

    values: list[torch.Tensor]
    saved_bytes: int
    regions: int
    ends_bytes: int


def aot_eager(partitioner: BudgetPartitioner | None) -> Backend:
    """Runs the graphs of a region without compiling them. Without a partitioner it is torch's backend of that name."""
    if partitioner is None:
        backend: Backend = lookup_backend("aot_eager")
        return backend
    made: Any = aot_autograd(fw_compiler=_as_it_is, partition_fn=partitioner, keep_inference_input_mutations=True)
    return made  # type: ignore[no-any-return]


def inductor(partitioner: BudgetPartitioner | None) -> Backend:
    """Torch's Inductor, with the partitioner as its option."""
    options: Mapping[str, Any] = {} if partitioner is None else {"custom_partitioner_fn": partitioner}

    def compiled(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx  # torch warns of its own code while it is imported

        found: Any = compile_fx(module, inputs, config_patches=dict(options))
        return found  # type: ignore[no-any-return]

    return compiled


def measured_step(step: nn.Module, inputs: tuple[torch.Tensor, ...], backend: Backend) -> Run:
    """One step of `step`, which returns its loss. Its buffers are restored, so that each step begins as the first."""
    torch._dynamo.reset()
    step.zero_grad(set_to_none=True)
    before = [buffer.detach().clone() for buffer in step.buffers()]
    given: list[torch.Tensor] = []
    regions = 0

    def watched(module: fx.GraphModule, examples: Any) -> Callable[..., Any]:
        compiled = backend(module, examples)

        def region(*arguments: Any) -> Any:
            nonlocal regions
            returned = compiled(*arguments)
            # They are held until the step is measured: a freed address could be that of a saved tensor.
            given.extend(one for one in tree_leaves((arguments, returned)) if isinstance(one, torch.Tensor))
            regions += 1
            return returned

        return region

    torch.manual_seed(_SEED)
    loss = torch.compile(step, backend=watched)(*inputs)
    ends = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in given}
    saved = [one for one in _saved_by(loss) if not graph_copies.is_on_host(one)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in saved}
    loss.backward()
    gradients = [one.grad.clone() for one in step.parameters() if one.grad is not None]
    values = [loss.detach(), *(buffer.detach().clone() for buffer in step.buffers()), *gradients]
    with torch.no_grad():
        for buffer, value in zip(step.buffers(), before, strict=True):
            buffer.copy_(value)
    saved_bytes = sum(size for address, size in storages.items() if address not in ends)
    return Run(values, saved_bytes, regions, sum(ends.values()))


def equal_bits(ours: Run, theirs: Run) -> bool:
    """True if loss, buffers and gradients are the same bits."""
    return len(ours.values) == len(theirs.values) and all(map(_same, ours.values, theirs.values))


def difference(ours: Run, theirs: Run) -> float:
    """The largest distance of two tensors of the step, as a share of the norm of theirs."""
    found = 0.0
    for mine, other in zip(ours.values, theirs.values, strict=True):
        if mine.is_floating_point() and not _same(mine, other):
            norm = other.double().norm().item()
            found = max(found, (mine.double() - other.double()).norm().item() / (norm or 1.0))
    return found


def _same(mine: torch.Tensor, other: torch.Tensor) -> bool:
    return mine.shape == other.shape and bool(torch.equal(mine, other))


def _as_it_is(module: fx.GraphModule, _inputs: object) -> Callable[..., Any]:
    def run(arguments: list[Any]) -> Any:
        return module.forward(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _saved_by(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    pending, seen = [loss.grad_fn], set[Any]()
    while pending:
        node: Any = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CompiledFunction" in node.name():
            yield from node.saved_tensors
            yield from getattr(node, "_tensors_no_vc_check", ())
        pending.extend(one for one, _ in node.next_functions)
