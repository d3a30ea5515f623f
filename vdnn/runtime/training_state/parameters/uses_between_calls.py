"""Notices what the program does with parameters between calls of modules.

[Note: Between calls] Parameters that are away are on the host between calls, where operations cannot mix them with
tensors of their device: averages of weights that are on the device, perturbations, distances to earlier weights. So
a parameter is guarded there (parameter_guard), and comes to the device for each function that gets it, and for a read
of `.data`. It leaves with the next use of another one, or at once if it was written to, unless the program holds what
it got. state_dict(), copies and pickles are made of the host's. Where the program holds memory of the host, or the
device has no room, parameters are used on the host. No function mode is active, and none is guarded while a module
runs. In a backward, where a checkpoint calls modules again, those that do not run stay guarded: no module that runs
later would show that the backward is over.

Where the device is the CPU itself, nothing has to move, and trained parameters are guarded only in the first calls of
a model, for reads with a gradient, such as a penalty on a norm. They make a graph of the host copy, whose gradient
would be the CPU's, so the parameter stays on the device from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch

from vdnn.runtime.torch_internals.backward_ends import in_backward
from vdnn.runtime.torch_internals.parameter_guard import guard, guard_no_longer, is_guarded, is_in_place

_SAVING = torch.nn.Module._save_to_state_dict.__code__
_COPIES = frozenset(("copy_", "cpu", "numpy"))  # names of functions that copy between devices


class UsesBetweenCalls:
    """Calls `read(parameters, held)` for the parameters that a graph was made of, which moves them to the device for
    good. `held`: ids of parameters for which `is_held(parameter)` was true before. A graph may hold memory, too.
    `bring`, `use_on_host` and `written`: see [Note: Between calls]. `device_of(parameter)` is what a program sees as
    its device. `becomes_another(parameter)` moves a parameter to the device for good, where another one is made of its
    memory."""

    def __init__(
        self,
        read: Callable[[list[torch.Tensor], set[int]], None],
        is_held: Callable[[torch.Tensor], bool],
        bring: Callable[..., bool],
        use_on_host: Callable[[list[torch.Tensor]], None],
        written: Callable[[list[torch.Tensor]], None],
        device_of: Callable[[torch.Tensor], torch.device | None],
        becomes_another: Callable[[torch.Tensor], None],
    ) -> None:
        self._read, self._is_held, self._bring, self._written = read, is_held, bring, written
        self._use_on_host = use_on_host
        self.device_of, self.becomes_another = device_of, becomes_another
        self._held: set[int] = set()
        self.read: set[int] = set()  # ids of parameters that any function has read on the host, or written to
        self._watched: dict[int, torch.nn.Parameter] = {}
        self._paused: list[torch.nn.Parameter] = []

    def begin(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """No module runs from now on."""
        for one in parameters:
            if type(one) is torch.nn.Parameter:
                self._watched[id(one)] = one
                guard(one, self)

    def step_ended(self) -> None:
        """An optimizer has stepped, which no longer reads parameters."""
        for one in self._watched.values():
            if type(one) is torch.nn.Parameter:
                guard(one, self)

    def end(self) -> None:
        """A module runs from now on."""
        watched, self._watched = self._watched, {}
        self._paused.clear()
        for one in watched.values():
            guard_no_longer(one)

    def pause(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """A module that reads these runs in a backward."""
        if not self._watched:
            return
        for one in parameters:
            if id(one) in self._watched and is_guarded(one):
                guard_no_longer(one)
                self._paused.append(one)

    def resume(self) -> None:
        """That module no longer runs."""
        paused, self._paused = self._paused, []
        for one in paused:
            if id(one) in self._watched and type(one) is torch.nn.Parameter:
                guard(one, self)

    def forget(self, parameter: torch.Tensor) -> None:
        """The session no longer manages this one. If it stayed guarded, the next function that reads it would find that
        it has to move, and would be called twice."""
        self._watched.pop(id(parameter), None)
        guard_no_longer(parameter)

    def before_use(self, parameter: torch.Tensor) -> None:
        guard_no_longer(parameter)
        with torch._C.DisableTorchFunction():
            self._held.discard(id(parameter))
            if torch.is_grad_enabled() and self._is_held(parameter):
                self._held.add(id(parameter))

    def before_call(self, func: Callable[..., Any], parameters: list[torch.Tensor], caller: CodeType) -> bool:
        is_of_host = getattr(func, "__name__", "") in _COPIES or caller is _SAVING
        if not is_of_host and self._bring(parameters, writes=is_in_place(func)):
            return True
        if is_of_host:
            self._use_on_host(parameters)
        if not in_backward():  # recomputes read there
            self.read.update(map(id, parameters))
        return False

    def after_use(
        self, parameters: list[torch.Tensor], outcome: Any, error: Exception | None, *, writes: bool, brought: bool
    ) -> bool:
        """A function was called with `parameters`. True: it has to be called again, now that they are on the device."""
        known = [one for one in parameters if id(one) in self._watched]
        fails_on_host = error is not None and not brought
        if not writes and torch.is_grad_enabled() and (fails_on_host or _is_in_graph(outcome)):
            trained = [one for one in known if one.requires_grad]
            for one in trained:
                del self._watched[id(one)]
            self._read(trained, self._held)
            known = [one for one in known if id(one) in self._watched]
            again = bool(trained) and not brought
        else:
            again = False
        for one in known:
            if not is_guarded(one):
                guard(self._watched[id(one)], self)
        if writes and brought:
            self._written(known)
        return again


def _is_in_graph(outcome: object) -> bool:
    if isinstance(outcome, torch.Tensor):
        return outcome.grad_fn is not None
    return isinstance(outcome, (list, tuple)) and any(map(_is_in_graph, outcome))
