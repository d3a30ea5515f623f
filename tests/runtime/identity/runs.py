"""One call, forward and backward, as a user of autograd makes it: the same for the plain run and for the run in a
session.

The inputs of a call are copies made within the run, which nothing else holds, so that the saves of the call can be
released. `nudge` makes two saves of its own. With a window of one byte, the first issues the copies of the call, and
the second releases the last of their sources, so that every later use has to reload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.runtime.identity.outcome import Outcome

SEED = 17
NUDGE_SAVES = 2


class Mode(Enum):
    """How often and how deep a graph is differentiated."""

    ONCE = "one backward"
    TWICE = "two backwards, the first with retain_graph"
    DOUBLE = "a backward with create_graph, and one of its result"


class Inputs(Enum):
    """The tensors that the call gets."""

    FRESH = "results of an operation, held by nobody else"
    LEAVES = "leaves, which stay on the device"


Call = Callable[..., Any]


def run_call(call: Call, arguments: Any, mode: Mode, inputs: Inputs = Inputs.FRESH) -> Outcome:
    """`call(*args, **kwargs)` on copies of `arguments`, a pair of args and kwargs. Errors are part of the outcome."""
    leaves, given = leaves_of(arguments)
    if inputs is Inputs.LEAVES:
        return run_step(lambda: call(*given[0], **given[1]), leaves, mode)
    return run_step(lambda: _on_fresh(call, given), leaves, mode)


def run_step(forward: Callable[[], Any], leaves: list[torch.Tensor], mode: Mode) -> Outcome:
    """Records what `forward` returns and the gradients of `leaves`, from a fixed seed."""
    torch.manual_seed(SEED)
    outcome = Outcome()
    try:
        _differentiate(outcome, _forward(outcome, forward), leaves, mode)
    except Exception as error:
        outcome.error = error.with_traceback(None)
    return outcome


def _on_fresh(call: Call, given: Any) -> Any:
    args, kwargs = fresh_copies(given)
    return call(*args, **kwargs)


def _forward(outcome: Outcome, forward: Callable[[], Any]) -> list[torch.Tensor]:
    """Records the results, and returns clones from which backward starts. A result that its own operation saved could
    not be released while it is held."""
    values = [value for value in tree_leaves(forward()) if isinstance(value, torch.Tensor)]
    for index, value in enumerate(values):
        outcome.note(f"value {index}", value)
    return [(value if value.layout is torch.strided else value.to_dense()).clone() for value in _roots(values)]


def _differentiate(outcome: Outcome, ends: list[torch.Tensor], leaves: list[torch.Tensor], mode: Mode) -> None:
    if not ends or not leaves:
        return
    outcome.nudges.append(nudge())
    again = mode is not Mode.ONCE
    first = _gradients(ends, leaves, retain_graph=again, create_graph=mode is Mode.DOUBLE)
    _note_all(outcome, "gradient", first)
    if mode is Mode.TWICE:
        _note_all(outcome, "gradient again", _gradients(ends, leaves))
    roots = _roots(gradient for gradient in first if gradient is not None)
    if mode is Mode.DOUBLE and roots:
        del first
        outcome.nudges.append(nudge())
        _note_all(outcome, "second gradient", _gradients(roots, leaves))


def nudge() -> list[torch.Tensor]:
    """Two results, each of which saved a tensor of its own. See the docstring of this file."""
    one = torch.ones(1, requires_grad=True)
    return [one * torch.ones(1) for _ in range(NUDGE_SAVES)]


def _gradients(
    ends: list[torch.Tensor], leaves: list[torch.Tensor], *, retain_graph: bool = False, create_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    generator = torch.Generator().manual_seed(SEED)
    weights = [torch.randn(end.shape, dtype=end.dtype, generator=generator) for end in ends]
    return torch.autograd.grad(
        ends, leaves, weights, retain_graph=retain_graph or create_graph, create_graph=create_graph, allow_unused=True
    )


def _note_all(outcome: Outcome, name: str, tensors: Iterable[torch.Tensor | None]) -> None:
    for index, tensor in enumerate(tensors):
        outcome.note(f"{name} {index}", tensor)


def _roots(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def leaves_of(arguments: Any) -> tuple[list[torch.Tensor], Any]:
    """Copies of all tensors, and those of them that require grad. A tensor that occurs twice is copied once."""
    known: dict[int, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in known:
            known[id(value)] = copied(value).requires_grad_(value.requires_grad)
        return known[id(value)]

    given = tree_map(copy, arguments)
    return [tensor for tensor in known.values() if tensor.requires_grad], given


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same geometry, down to offset and overlap, in a storage of its own."""
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Fresh(torch.autograd.Function):
    """The identity, in new memory of the same geometry."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return copied(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def fresh_copies(given: Any) -> Any:
    """Copies of all tensors in `given`, through which gradients flow back to them."""
    return tree_map(_fresh, given)


def _fresh(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not value.requires_grad:
        return copied(value)
    return _Fresh.apply(value) if value.layout is torch.strided else value.clone()
