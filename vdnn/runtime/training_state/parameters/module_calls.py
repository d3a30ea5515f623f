"""Follows the calls of modules: brings their parameters before a call, and drops them after it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from vdnn.errors import VdnnError
from vdnn.runtime.torch_internals import forks
from vdnn.runtime.torch_internals.backward_ends import in_backward
from vdnn.runtime.training_state.parameters.away_parameter import AwayParameter
from vdnn.runtime.training_state.parameters.graph_uses import GraphUses
from vdnn.runtime.training_state.parameters.streaming import Streaming

_BACKWARD = "backward"
_LOOKED_AT = 2  # calls of one model in which reads outside of modules are looked for


@dataclass(slots=True)
class _Call:
    """One call of a module that runs, and the parameters that it brought."""

    module: torch.nn.Module
    used: list[AwayParameter] = field(default_factory=list)
    nodes: list[object] = field(default_factory=list)  # where gradients of these arrive, until the graph holds them


class _Calls(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Call] = []


class ModuleCalls:
    """While entered, follows the calls of all modules. `away` are the managed parameters, by id.

    `let_stay(parameter, reason)` ends the management of one. `looked` is called once reads outside are known.
    """

    def __init__(
        self,
        away: dict[int, AwayParameter],
        streaming: Streaming,
        let_stay: Callable[[AwayParameter, str], None],
        looked: Callable[[], None],
    ) -> None:
        self._away = away
        self._streaming = streaming
        self._let_stay = let_stay
        self._looked = looked
        self.uses = GraphUses(self._let_go)
        self._calls = _Calls()
        self._running = 0  # outermost calls, on all threads
        self._read_in: weakref.WeakKeyDictionary[torch.nn.Module, list[AwayParameter]] = weakref.WeakKeyDictionary()
        self._called: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self._forks = forks.count

    def __enter__(self) -> ModuleCalls:
        hooks = torch.nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(self._before),
            hooks.register_module_forward_hook(self._after, always_call=True),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def lines(self) -> list[str]:
        names = sorted({one.name for read in self._read_in.values() for one in read})
        return [
            *(f"  parameter {name} is read outside of its module, and stays while its reader runs" for name in names),
            *(f"  parameter {name} is used again, and stays until its gradient is there" for name in self.uses.found),
        ]

    # Hooks.

    def _before(self, module: torch.nn.Module, args: object) -> None:
        if torch.compiler.is_compiling() or forks.count != self._forks or not self._away:
            return
        stack = self._calls.stack
        if stack and stack[0].module is module and not in_backward():
            stack.clear()  # Ctrl-C: torch calls no hooks behind it
            self._running = 0
        if not stack:
            self._begin(module)
        call = _Call(module)
        stack.append(call)
        wanted = [self._away[id(one)] for one in module._parameters.values() if id(one) in self._away]
        wanted += self._read_in.get(module, ())
        if wanted:
            self._bring(wanted, call)

    def _begin(self, module: torch.nn.Module) -> None:
        if not self._running and not in_backward():
            self.uses.release_dead()
            self._streaming.begin()
        self._running += 1
        called = self._called.get(module, 0)
        if called >= _LOOKED_AT:
            self._looked()
        self._called[module] = called + 1

    def _after(self, module: torch.nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling() or forks.count != self._forks:
            return
        stack = self._calls.stack
        if all(call.module is not module for call in stack):
            return
        while True:  # an exception may have skipped the exits of inner modules
            call = stack.pop()
            self._leave(call)
            if call.module is module:
                break
        if not stack:
            self._running = max(0, self._running - 1)
            if not self._running and not in_backward():
                self._streaming.drop_unused()

    # Parameters.

    def read(self, tensor: torch.Tensor, is_written: bool) -> bool:
        """A function is called with this parameter. True if it reads it on the host, between calls."""
        away = self._away.get(id(tensor))
        stack = self._calls.stack
        if away is None:
            return False
        if not stack:
            return not away.users and not in_backward()
        with torch._C.DisableTorchFunction():
            if is_written:
                self._give_back(away, "it is written to, or its data are taken, while a module runs")
            elif not away.users:
                call = stack[-1]
                self._read_in.setdefault(call.module, []).append(away)
                self._bring([away], call)
        return False

    def read_in_graph(self, tensors: list[torch.Tensor]) -> None:
        """Between calls, a graph is made of these parameters."""
        with torch._C.DisableTorchFunction():
            for away in [self._away[id(one)] for one in tensors if id(one) in self._away]:
                if away.parameter.requires_grad:
                    self._give_back(away, "it is read between calls of modules, with its gradient")

    def _bring(self, wanted: list[AwayParameter], call: _Call) -> None:
        with torch._C.DisableTorchFunction():
            for one in list(wanted):
                if one.parameter.requires_grad and not one.is_trained:
                    self._give_back(one, "it was frozen as the session began, and is trained now")
                    wanted.remove(one)
                elif not one.is_there():
                    self._refuse(one)
            if not wanted:
                return
            with self._streaming.lock:
                self._streaming.use(wanted, self._phase())
                for one in wanted:
                    one.users += 1
                    call.used.append(one)
                    moving = one.on_device
                    if one.users == 1 and moving is not None:
                        one.version = one.parameter._version
                        with torch.inference_mode(False):
                            one.parameter.data = moving.tensors[0]
                    call.nodes.append(self.uses.used(one))

    def _leave(self, call: _Call) -> None:
        with self._streaming.lock, torch._C.DisableTorchFunction():
            for one in call.used:
                one.users = max(0, one.users - 1)
                if not one.users:
                    self._let_go(one)
            call.nodes.clear()

    def _let_go(self, away: AwayParameter) -> None:
        """Neither a module nor a graph holds the parameter on the device."""
        if id(away.parameter) not in self._away:
            return
        with self._streaming.lock, torch._C.DisableTorchFunction():
            if away.parameter._version != away.version:
                self._give_back(away, "it is written to while its module runs")
            elif away.is_there():
                with torch.inference_mode(False):
                    away.parameter.data = away.host.tensor

    def _give_back(self, away: AwayParameter, reason: str) -> None:
        for read in self._read_in.values():
            if away in read:
                read.remove(away)
        self.keep_writes(away)
        self._let_stay(away, reason)

    def give_all_back(self, reason: str) -> None:
        """All parameters return to the device, and nothing is fetched any longer."""
        with self._streaming.lock, torch._C.DisableTorchFunction():
            for away in list(self._away.values()):
                self._give_back(away, reason)

    def keep_writes(self, away: AwayParameter) -> None:
        """Copies to the host what was written to the parameter on the device. Nothing holds it there any longer."""
        moving = away.on_device
        if moving is not None and away.users and away.parameter._version != away.version:
            away.host.tensor.copy_(moving.tensors[0])
        self.uses.forget(away)
        away.users = 0

    def _refuse(self, away: AwayParameter) -> None:
        raise VdnnError(
            f"parameter {away.name} was moved or replaced by .data, .to() or another conversion while a session with "
            "parameters= manages it. Convert the model before the session, or after it."
        )

    def _phase(self) -> Hashable:
        if in_backward():
            return _BACKWARD
        root = self._calls.stack[0].module
        return id(root), root.training
