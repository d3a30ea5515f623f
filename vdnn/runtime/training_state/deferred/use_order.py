"""Follows the calls of modules, to know which parameter each is about to use, and in which order they are used."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch

from vdnn.runtime.torch_internals import forks
from vdnn.runtime.torch_internals.backward_ends import in_backward
from vdnn.runtime.torch_internals.tensor_kinds import transform_level

_HOOKS = torch.nn.modules.module
# In evaluation they give the parameters of their parts to one kernel, unless one of these has a class of its own.
_FUSED_IN_EVALUATION = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder, torch.nn.MultiheadAttention)


class _Outermost(threading.local):
    module: torch.nn.Module | None = None


class UseOrder:
    """Calls `before(parameters)` ahead of every call of a module, and `behind()` after the outermost one."""

    def __init__(self, before: Callable[[list[torch.Tensor]], None], behind: Callable[[], None]) -> None:
        self._before = before
        self._behind = behind
        self._watched: dict[int, torch.Tensor] = {}  # by id
        self._positions: dict[int, int] = {}  # by id, of the last round
        self._now: dict[int, int] = {}
        self._outermost = _Outermost()
        self._handles: list[Any] = []
        self._forks = forks.count

    def watch(self, parameter: torch.Tensor) -> None:
        self._watched[id(parameter)] = parameter

    def enter(self) -> None:
        handle = _HOOKS.register_module_forward_pre_hook(self._enter_module)
        # Ahead of the hooks that look at the memory of parameters.
        hooks: Any = _HOOKS._global_forward_pre_hooks
        hooks.move_to_end(handle.id, last=False)
        self._handles = [handle, _HOOKS.register_module_forward_hook(self._leave_module, always_call=True)]

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        del self._before, self._behind  # whoever is called holds this

    def begin(self) -> None:
        """A round begins: the order of uses from now on is the next one's guess."""
        if self._now:
            self._positions, self._now = self._now, {}

    def position(self, parameter: torch.Tensor) -> int:
        """The place of `parameter` in the order of first uses; those that were not used come last."""
        return (self._now or self._positions).get(id(parameter), len(self._watched))

    def _enter_module(self, module: torch.nn.Module, args: object) -> None:
        if torch.compiler.is_compiling() or self._forks != forks.count:
            return
        if not in_backward() and self._outermost.module in (None, module):  # the same: Ctrl-C calls no hooks
            self._outermost.module = module
        own = _own_and_hidden(module)
        parameters = [one for one in own if id(one) in self._watched]
        if len(self._now) < len(self._watched):
            for one in parameters:
                self._now.setdefault(id(one), len(self._now))
        self._before(list(self._watched.values()) if transform_level() is not None else parameters)

    def _leave_module(self, module: torch.nn.Module, args: object, output: object) -> None:
        if self._outermost.module is module and not torch.compiler.is_compiling():
            self._outermost.module = None
            self._behind()


def _own_and_hidden(module: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters of `module`, and those of its parts if they run where no hook is."""
    is_whole = isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None
    is_whole = is_whole or type(module).__name__ == "OptimizedModule"
    is_whole = is_whole or (isinstance(module, _FUSED_IN_EVALUATION) and not module.training)
    parts = itertools.chain.from_iterable(part._parameters.values() for part in (module.modules() if is_whole else ()))
    own = parts if is_whole else iter(module._parameters.values())
    return [one for one in own if one is not None]
