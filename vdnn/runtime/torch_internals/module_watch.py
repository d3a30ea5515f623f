"""Follows module calls through torch's global hooks: the running modules, and the storages of parameters and buffers.

The storages are read again at every call of a module, because FSDP and similar libraries swap parameter storages
between calls. csrc/hooks/running_modules.cpp does that. The hooks themselves are in Python, which dynamo reads.

[Note: Facts at boundaries] A session that recomputes notes facts at the beginning and at the end of module calls: the
settings of torch, the versions of leaves, the arguments of norms. In a settled step it notes them only where a recipe
of earlier steps needed them. What was not noted is not known, and then nothing is recomputed from it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd

from vdnn import _C
from vdnn.runtime.torch_internals.storage_set import StorageSet
from vdnn.runtime.torch_internals.tensor_kinds import CLASSES_WITH_DATA, storage_of

# The facts of [Note: Facts at boundaries]; csrc/hooks/running_modules.cpp has the same numbers.
SETTINGS, LEAVES, NORMS = 1, 2, 4
_is_compiling = torch.compiler.is_dynamo_compiling  # constant while dynamo reads the hooks


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

    def __init__(self) -> None:
        self.stack: list[torch.nn.Module] = []


class ModuleWatch:
    """While entered, follows module calls on all threads.

    Modules may be added to `marked` at any time. `begins` is called at the beginning of each outermost module call.
    """

    def __init__(self, marked: MarkedModules, begins: Callable[[torch.nn.Module], object] | None = None) -> None:
        self.parameters = StorageSet()
        self.marked = marked
        self.running = _C.RunningModules(
            begins,
            partial(_add_storage, self.parameters),
            CLASSES_WITH_DATA,
            self.parameters.references,
            torch._C.TensorBase.untyped_storage,
            torch._C._autograd._get_sequence_nr,
            vars(torch.compiler),
            _Calls(),
        )
        self._handles: list[Any] = []
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._models: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()

    def install(self) -> Callable[[], None]:
        """Watches the calls of all modules, until the returned function is called."""
        module_hooks = torch.nn.modules.module
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._enter_module),
            module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self.remove

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.running.begin_anew(_Calls())

    def _enter_module(self, module: torch.nn.Module, args: object) -> None:
        if not _is_compiling():
            self.running.enter(module, args)

    def _leave_module(self, module: torch.nn.Module, args: object, output: object) -> None:
        if not _is_compiling():
            self.running.leave(module, output)

    def stack(self) -> list[torch.nn.Module]:
        """The module calls that are running on this thread, the outermost first: always the same list of a thread."""
        return self.running.stack()

    def innermost(self) -> torch.nn.Module | None:
        stack = self.running.stack()
        return stack[-1] if stack else None

    def path(self) -> str:
        """The name of the innermost module in named_modules() of the outermost, or its class name if it has none."""
        stack = self.running.stack()
        if not stack:
            return ""
        root, module = stack[0], stack[-1]
        names = self._paths.get(root)
        if names is None or id(module) not in names:
            names = self._paths[root] = {id(one): name for name, one in root.named_modules()}
        return names.get(id(module)) or type(module).__name__

    def model(self) -> int:
        """Tells models with other parameters apart, though their modules have the same names; 0 outside of a module."""
        stack = self.running.stack()
        if not stack:
            return 0
        model = self._models.get(stack[0])
        if model is None:
            model = self._models[stack[0]] = hash(tuple(tuple(one.shape) for one in stack[0].parameters()))
        return model

    def in_marked(self) -> bool:
        return bool(self.marked.references) and any(module in self.marked for module in self.running.stack())


def _add_storage(parameters: StorageSet, tensor: torch.Tensor) -> None:
    storage = storage_of(tensor)
    if storage is not None:
        parameters.add(storage)


def is_conv(module: torch.nn.Module | None) -> bool:
    return isinstance(module, _ConvNd)
