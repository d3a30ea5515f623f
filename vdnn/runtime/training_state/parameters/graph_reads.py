"""Finds parameters that the program reads between calls of modules, with their gradient: a penalty on a norm.

Such a read makes a graph of the host copy, whose gradient would be the CPU's. So in the first calls of a model its
trained parameters are guarded between calls: see parameter_guard. No function mode is active, and none of them is
guarded while a module runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from vdnn.runtime.torch_internals.parameter_guard import guard, guard_no_longer, is_guarded


class GraphReads:
    """`read(parameters, held)` is called for those that a graph was made of, and brings them to the device for good.
    `held` are the ids of those for which `is_held(parameter)` before: a graph may hold memory, too."""

    def __init__(
        self, read: Callable[[list[torch.Tensor], set[int]], None], is_held: Callable[[torch.Tensor], bool]
    ) -> None:
        self._read, self._is_held = read, is_held
        self._held: set[int] = set()
        self._watched: dict[int, torch.nn.Parameter] = {}

    def begin(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """No module runs from now on."""
        for one in parameters:
            if type(one) is torch.nn.Parameter and one.requires_grad:
                self._watched[id(one)] = one
                guard(one, self)

    def end(self) -> None:
        """A module runs from now on."""
        watched, self._watched = self._watched, {}
        for one in watched.values():
            guard_no_longer(one)

    def before_use(self, parameter: torch.Tensor) -> None:
        guard_no_longer(parameter)
        with torch._C.DisableTorchFunction():
            self._held.discard(id(parameter))
            if torch.is_grad_enabled() and self._is_held(parameter):
                self._held.add(id(parameter))

    def after_use(self, parameters: list[torch.Tensor], outcome: Any, error: Exception | None, *, writes: bool) -> bool:
        """A function was called with `parameters`. True: it has to be called again, now that they are on the device."""
        known = [one for one in parameters if id(one) in self._watched]
        if not writes and torch.is_grad_enabled() and (error is not None or _is_in_graph(outcome)):
            for one in known:
                del self._watched[id(one)]
            self._read(known, self._held)
            return bool(known)
        for one in known:
            if not is_guarded(one):
                guard(self._watched[id(one)], self)
        return False


def _is_in_graph(outcome: object) -> bool:
    if isinstance(outcome, torch.Tensor):
        return outcome.grad_fn is not None
    return isinstance(outcome, (list, tuple)) and any(map(_is_in_graph, outcome))
