"""Lets a function of ours hear which parameters a program takes from a module.

`module.weight` and `module.parameters()` end in the dict `module._parameters`, so a dict of ours is put in its place,
as DeepSpeed does for ZeRO-3. A program that takes a parameter gets the very object, and nothing that torch asks of it
differs: neither a mode nor the class of a parameter. `values()` is not watched; the hooks of this package use it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

Taken = Callable[[torch.nn.Parameter], None]


class WatchedDict(dict[str, Any]):
    """The parameters of one module. `taken` is called before a program gets one."""

    __slots__ = ("taken",)

    def __init__(self, parameters: dict[str, Any], taken: Taken) -> None:
        super().__init__(parameters)
        self.taken = taken

    def __getitem__(self, name: str) -> Any:
        parameter = dict.__getitem__(self, name)
        if parameter is not None:
            self.taken(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        parameter = dict.get(self, name, default)
        if isinstance(parameter, torch.nn.Parameter):
            self.taken(parameter)
        return parameter

    def items(self) -> Any:
        return _Items(self)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        copied = memo[id(self)] = dict[str, Any]()
        copied.update((name, copy.deepcopy(value, memo)) for name, value in dict.items(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (list(dict.items(self)),)


class _Items:
    """dict.items(), which calls `taken` for each as it comes."""

    __slots__ = ("_of",)

    def __init__(self, of: WatchedDict) -> None:
        self._of = of

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        taken = self._of.taken
        for pair in dict.items(self._of):
            if pair[1] is not None:
                taken(pair[1])
            yield pair

    def __len__(self) -> int:
        return len(self._of)


def watch_parameters_of(module: torch.nn.Module, taken: Taken) -> Callable[[], None]:
    """Calls `taken` for each parameter that a program takes from `module`. Returns the function that undoes this."""
    attributes = vars(module)
    before: dict[str, Any] = attributes["_parameters"]
    watched = attributes["_parameters"] = WatchedDict(before, taken)

    def undo() -> None:
        if attributes.get("_parameters") is watched:
            before.clear()
            before.update(dict.items(watched))
            attributes["_parameters"] = before

    return undo
