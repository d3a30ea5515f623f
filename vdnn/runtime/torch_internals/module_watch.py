"""Follows module calls through torch's global hooks: the running modules, and the storages of parameters and buffers.

The storages are read again at every call of a module, because FSDP and similar libraries swap parameter storages
between calls.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd

from vdnn.runtime.torch_internals.storage_set import StorageSet
from vdnn.runtime.torch_internals.tensor_kinds import storage_of


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

    def __init__(self, marked: MarkedModules, begins: Callable[[torch.nn.Module], None] | None = None) -> None:
        self.parameters = StorageSet()
        self.marked = marked
        self._begins = begins
        self._calls = _Calls()
        self._handles: list[Any] = []
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._models: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()

    def __enter__(self) -> ModuleWatch:
        module_hooks = torch.nn.modules.module
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._enter_module),
            module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._calls = _Calls()

    def _enter_module(self, module: torch.nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            return  # the compiled code has no module calls: its saves belong to the whole region
        stack = self._calls.stack
        if not stack and self._begins is not None:
            self._begins(module)
        stack.append(module)
        for group in (module._parameters, module._buffers):
            for tensor in group.values():
                storage = None if tensor is None else storage_of(tensor)
                if storage is not None:
                    self.parameters.add(storage)

    def _leave_module(self, module: torch.nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._calls.stack
        # An exception may have skipped the exits of inner modules, and a graph break the entry of this one.
        while module in stack and stack.pop() is not module:
            pass

    def stack(self) -> list[torch.nn.Module]:
        """The module calls that are running on this thread, the outermost first: always the same list of a thread."""
        return self._calls.stack

    def innermost(self) -> torch.nn.Module | None:
        stack = self._calls.stack
        return stack[-1] if stack else None

    def path(self) -> str:
        """The name of the innermost module in named_modules() of the outermost, or its class name if it has none."""
        stack = self._calls.stack
        if not stack:
            return ""
        root, module = stack[0], stack[-1]
        names = self._paths.get(root)
        if names is None or id(module) not in names:
            names = self._paths[root] = {id(one): name for name, one in root.named_modules()}
        return names.get(id(module)) or type(module).__name__

    def model(self) -> int:
        """Tells models with other parameters apart, though their modules have the same names; 0 outside of a module."""
        stack = self._calls.stack
        if not stack:
            return 0
        model = self._models.get(stack[0])
        if model is None:
            model = self._models[stack[0]] = hash(tuple(tuple(one.shape) for one in stack[0].parameters()))
        return model

    def in_marked(self) -> bool:
        return bool(self.marked.references) and any(module in self.marked for module in self._calls.stack)


def is_conv(module: torch.nn.Module | None) -> bool:
    return isinstance(module, _ConvNd)
