"""Follows module calls through torch's global hooks: the running modules, and the storages of parameters and buffers.

The storages are read again at every call of a module, because FSDP and similar libraries swap parameter storages
between calls. csrc/hooks/running_modules.cpp does that. The hooks themselves are in Python, which dynamo reads.

[Note: Rest] Any global hook makes torch call every module in a slower way, which costs 2 to 3 us a call. A settled step
that recomputes nothing needs none of it, so between two such steps the watch may rest: no hook is installed, and who
asks for the running modules gets those of the frames of the thread. As soon as a step needs more, the watch follows the
calls again: `follow`. Those that run by then will end unseen, so until the step ends the stack is read from the frames.
It never rests once dynamo has compiled something, because compiled code is guarded on torch's global hooks.

[Note: Facts at boundaries] A session that recomputes notes facts at the beginning and at the end of module calls: the
settings of torch and the versions of leaves. In a settled step it notes them only where a recipe of earlier steps
needed them; while the watch rests, the versions of leaves are noted at the end of a step (leaves_at_rest.py). A fact
that was not noted is unknown, and then nothing is recomputed from it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd

from vdnn import _C
from vdnn.runtime.torch_internals.storage_set import StorageSet
from vdnn.runtime.torch_internals.tensor_kinds import CLASSES_WITH_DATA, storage_of

# The facts of [Note: Facts at boundaries]; csrc/hooks/running_modules.cpp has the same numbers.
SETTINGS, LEAVES = 1, 2
_is_compiling = torch.compiler.is_dynamo_compiling  # constant while dynamo reads the hooks
_DYNAMO = "torch._dynamo.convert_frame"  # the module that compiles frames


class MarkedModules:
    """A set of weak references to modules. Every save tests if it is empty, for which a WeakSet takes ten times as
    long."""

    def __init__(self) -> None:
        self.references: set[weakref.ref[torch.nn.Module]] = set()

    def add(self, module: torch.nn.Module) -> None:
        self.references.add(weakref.ref(module, self.references.discard))

    def __contains__(self, module: object) -> bool:
        return weakref.ref(module) in self.references


class _Calls(threading.local):
    """The module calls that are running on this thread, the outermost first."""

    def __init__(self, threads: set[int]) -> None:
        """`threads`: those that have called modules."""
        self.stack: list[torch.nn.Module] = []
        threads.add(threading.get_ident())


def calls_in_frames() -> list[torch.nn.Module]:
    """The modules whose calls are running on this thread, the outermost first."""
    call = getattr(torch.nn.Module._call_impl, "__code__", None)
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is call and isinstance(module := frame.f_locals.get("self"), torch.nn.Module):
            found.append(module)
        frame = frame.f_back
    found.reverse()
    return found


def has_compiled() -> bool:
    """True if dynamo has compiled something in this process."""
    return bool(getattr(sys.modules.get(_DYNAMO), "FRAME_COUNTER", _DYNAMO in sys.modules))


class ModuleWatch:
    """While entered, follows module calls on all threads.

    Modules may be added to `marked` at any time. `begins` is called at the beginning of each outermost module call.
    """

    def __init__(self, marked: MarkedModules, begins: Callable[[torch.nn.Module], object] | None = None) -> None:
        self.parameters = StorageSet()
        self.marked = marked
        self.rests = False  # see [Note: Rest]
        self.reads_frames = False  # calls that run now have begun unseen
        self._begins = begins
        self._threads: set[int] = set()
        self.running = _C.RunningModules(
            begins,
            partial(_add_storage, self.parameters),
            CLASSES_WITH_DATA,
            self.parameters.references,
            torch._C.TensorBase.untyped_storage,
            torch._C._autograd._get_sequence_nr,
            vars(torch.compiler),
            _Calls(self._threads),
        )
        self._is_installed = False
        self._handles: list[Any] = []
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._models: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()

    def install(self) -> Callable[[], None]:
        """Watches the calls of all modules, until the returned function is called."""
        self._is_installed = True
        if self.rests:
            self.running.rest(True)
        else:
            self._add_hooks()
        return self.remove

    def _add_hooks(self) -> None:
        module_hooks = torch.nn.modules.module
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._enter_module),
            module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.reads_frames = False
        self._threads.clear()
        self.running.begin_anew(_Calls(self._threads))

    def remove(self) -> None:
        self._is_installed = False
        self._remove_hooks()
        self.running.rest(False)

    @property
    def may_rest(self) -> bool:
        running = self.running
        needs_calls = running.needs_boundaries or running.notes_everything or self.marked.references
        return not needs_calls and not has_compiled()

    def step_ended(self, *, may_rest: bool) -> None:
        """A step is over. `may_rest`: the next one is expected to need nothing of the calls."""
        may_rest = may_rest and not self.rests and self.may_rest and len(self._threads) <= 1
        if (may_rest or self.reads_frames) and not calls_in_frames():
            self.reads_frames = False
            self.running.stack().clear()
            if may_rest:
                self._remove_hooks()
                self.rests = True
                if self._is_installed:
                    self.running.rest(True)

    def follow(self) -> None:
        """Follows the calls again. Raises if a model that has begun to run cannot run in a session."""
        if not self.rests:
            return
        self.rests = False
        self.running.rest(False)
        if not self._is_installed:
            return
        self.reads_frames = True
        self._add_hooks()
        calls = calls_in_frames()
        if calls:
            for tensor in (*calls[0].parameters(), *calls[0].buffers()):
                _add_storage(self.parameters, tensor)
            self._begin(calls[0])

    def _begin(self, model: torch.nn.Module) -> None:
        has_grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)  # as where the call began: the hooks of saves run without
        try:
            if self._begins is not None:
                self._begins(model)
        finally:
            torch._C._set_grad_enabled(has_grad_mode)

    def _enter_module(self, module: torch.nn.Module, args: object) -> None:
        if not _is_compiling():
            if self.reads_frames:
                self.running.stack()[:] = calls_in_frames()[:-1]  # the last one is this call
            self.running.enter(module)

    def _leave_module(self, module: torch.nn.Module, args: object, output: object) -> None:
        if not _is_compiling():
            self.running.leave(module)

    def stack(self) -> list[torch.nn.Module]:
        """The module calls that are running on this thread, the outermost first: always the same list of a thread."""
        stack = self.running.stack()
        if self.rests or self.reads_frames:
            stack[:] = calls_in_frames()
        return stack

    def innermost(self) -> torch.nn.Module | None:
        stack = self.stack()
        return stack[-1] if stack else None

    def path(self) -> str:
        """The name of the innermost module in named_modules() of the outermost, or its class name if it has none."""
        stack = self.stack()
        if not stack:
            return ""
        root, module = stack[0], stack[-1]
        names = self._paths.get(root)
        if names is None or id(module) not in names:
            names = self._paths[root] = {id(one): name for name, one in root.named_modules()}
        return names.get(id(module)) or type(module).__name__

    def model(self) -> int:
        """Tells models with other parameters apart, though their modules have the same names; 0 outside of a module."""
        stack = self.stack()
        if not stack:
            return 0
        model = self._models.get(stack[0])
        if model is None:
            model = self._models[stack[0]] = hash(tuple(tuple(one.shape) for one in stack[0].parameters()))
        return model

    def in_marked(self) -> bool:
        return bool(self.marked.references) and any(module in self.marked for module in self.stack())


def _add_storage(parameters: StorageSet, tensor: torch.Tensor) -> None:
    storage = storage_of(tensor)
    if storage is not None:
        parameters.add(storage)


def is_conv(module: torch.nn.Module | None) -> bool:
    return isinstance(module, _ConvNd)
