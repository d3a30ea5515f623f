"""Keeps a parameter on the device from its first use to its gradient, if a graph uses it more than once.

[Note: One accumulator] autograd sums the gradients of all uses of a parameter in one graph, and adds the sum to
`parameter.grad`. torch starts a new sum when the data of a parameter are put on another device. Two sums that are added
one after another round otherwise than one. So the data of a parameter that is used again stay on the device until its
gradient is there. Tied parameters are known before; others when they are used again while a graph with them lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from vdnn.runtime.torch_internals.backward_ends import graph_task
from vdnn.runtime.torch_internals.tensor_kinds import outside_of_transforms
from vdnn.runtime.training_state.parameters.away_parameter import AwayParameter

_MARK = "vdnn"


class _Mark:
    """Lives as long as the node of a graph that has it."""

    __slots__ = ("__weakref__",)


class GraphUses:
    """`let_go(parameter)` is called when no graph holds it any longer."""

    def __init__(self, let_go: Callable[[AwayParameter], object]) -> None:
        self._let_go = let_go
        self._held: list[AwayParameter] = []
        self.found: set[str] = set()  # names of those that were found to be used again

    def used(self, away: AwayParameter) -> object:
        """A module is about to use `away`, whose data are on the device. Returns what has to live until its use."""
        parameter = away.parameter
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return None
        task = graph_task()
        if not away.is_shared and any(one == task and mark() is not None for one, mark in away.accumulators):
            away.is_shared = True
            self.found.add(away.name)
        if away.is_shared and not away.is_held:
            away.is_held = True
            away.users += 1
            self._held.append(away)
        with outside_of_transforms():  # inside of them, the parameter's view has no grad_fn
            node = torch.autograd.graph.get_gradient_edge(parameter).node
        known: dict[str, object] = node.metadata  # type: ignore[assignment]  # a property, which torch says is a method
        if _MARK not in known:
            mark = _Mark()
            known[_MARK] = mark
            away.accumulators = [pair for pair in away.accumulators if pair[1]() is not None]
            away.accumulators.append((task, weakref.ref(mark)))
        return node

    def accumulated(self, away: AwayParameter) -> None:
        """The gradient of `away` was accumulated, or a part of it if torch began another sum, because the second use
        was not known."""
        away.in_parts = sum(mark() is not None for _, mark in away.accumulators) > 1
        away.accumulators.clear()
        self._release(away)

    def release_dead(self) -> None:
        """Releases what graphs held that no longer exist."""
        for away in list(self._held):
            if all(mark() is None for _, mark in away.accumulators):
                self._release(away)

    def forget(self, away: AwayParameter) -> bool:
        """No graph holds `away` any longer, whatever uses it. Returns True if one did."""
        was_held, away.is_held = away.is_held, False
        if was_held:
            away.users = max(0, away.users - 1)
            self._held.remove(away)
        return was_held

    def _release(self, away: AwayParameter) -> None:
        if self.forget(away) and not away.users:
            self._let_go(away)
