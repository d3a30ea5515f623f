"""Keeps a parameter on the device from its first use to its gradient, if a graph uses it more than once.

[Note: One accumulator] autograd sums the gradients of all uses of a parameter in one graph, and adds the sum to
`parameter.grad`. torch starts a new sum when the data of a parameter are put on another device. Two sums that are
added one after another round otherwise than one. So the data of a parameter that is used again stay on the device
until its gradient is there. Tied parameters are known before; others when they are used again while a graph with them
lives. By then the first use has a sum of its own. That changes no bit if autograd adds its gradient last. It does so
unless it is a sum of several, or the graph has gradients of its own (`create_graph=True`), which autograd may run
behind it. So until the first gradient of a parameter is there, its data stay behind a call of a module that used it
more than once. A hook on the gradient is called for each sum, which a warning says.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection

import torch
from torch.utils._pytree import tree_leaves

from vdnn.runtime.torch_internals.backward_ends import graph_task
from vdnn.runtime.torch_internals.gradient_hooks import has_hooks_of_others
from vdnn.runtime.torch_internals.tensor_kinds import outside_of_transforms
from vdnn.runtime.training_state.parameters.away_parameter import AwayParameter
from vdnn.user_warnings import warn

_MARK = "vdnn"
_LEAF = 2**64 - 1  # the sequence number of nodes at which gradients are accumulated
next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class _Mark:
    """Lives as long as the node of a graph that has it."""

    __slots__ = ("__weakref__",)


class GraphUses:
    """`let_go(parameter)` is called when no graph holds it any longer."""

    def __init__(self, let_go: Callable[[AwayParameter], object]) -> None:
        self._let_go = let_go
        self._held: list[AwayParameter] = []
        self.found: set[str] = set()  # names of parameters that were used again
        self._has_warned = False

    def used(self, away: AwayParameter) -> object:
        """A module is about to use `away`, whose data are on the device. Returns an object to keep until the use."""
        parameter = away.parameter
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return None
        task = graph_task()
        if not away.is_shared and any(one == task and mark() is not None for one, mark in away.accumulators):
            away.is_shared = True
            self.found.add(away.name)
        if away.is_shared and not away.is_held:
            self._hold(away)
        with outside_of_transforms():  # inside of them, the parameter's view has no grad_fn
            node = torch.autograd.graph.get_gradient_edge(parameter).node
        known: dict[str, object] = node.metadata  # type: ignore[assignment]  # a property, which torch says is a method
        if _MARK not in known:
            mark = _Mark()
            known[_MARK] = mark
            away.accumulators = [pair for pair in away.accumulators if pair[1]() is not None]
            away.accumulators.append((task, weakref.ref(mark)))
        return node

    def call_ends(self, used: list[AwayParameter], nodes: list[object], began_at: int, output: object) -> None:
        """A call of a module that used these parameters ends. Their gradients arrive at `nodes`. Holds the parameters
        that it used more than once, unless it is known by now whether graphs use them again."""
        unknown = {
            node: away
            for away, node in zip(used, nodes, strict=True)
            if node is not None and not (away.is_shared or away.is_held or away.is_summed)
        }
        if not unknown or output is None:
            return
        for node, times in _edges_to(unknown.keys(), output, began_at).items():
            if times > 1:
                self._hold(unknown[node])

    def _hold(self, away: AwayParameter) -> None:
        away.is_held = True
        away.users += 1
        self._held.append(away)

    def accumulated(self, away: AwayParameter) -> None:
        """The gradient of `away` was accumulated, or a part of it if torch began another sum, because the second use
        was not known."""
        away.is_summed = True
        away.in_parts = sum(mark() is not None for _, mark in away.accumulators) > 1
        if away.in_parts and not self._has_warned and has_hooks_of_others(away.parameter):
            self._has_warned = True
            warn(
                f"a hook on the gradient of {away.name} is called for each part of it in this step, because a graph "
                "uses this parameter more than once, which was not known yet. Later steps call it once. Call the model "
                "once before the first step, and drop what it returns, so that the first step does too."
            )
        away.accumulators.clear()
        self._release(away)

    @property
    def holds_some(self) -> bool:
        return bool(self._held)

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


def _edges_to(nodes: Collection[object], output: object, began_at: int) -> Counter[object]:
    """How many edges of the graph of `output` lead to each of the nodes. Looks only at nodes that were made since
    `began_at`."""
    found: Counter[object] = Counter()
    waiting = [one.grad_fn for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node in nodes:
                found[node] += 1
            elif node is not None and node not in seen and began_at <= node._sequence_nr() < _LEAF:
                seen.add(node)
                waiting.append(node)
    return found
