"""Remembers which version a leaf had when an operation read it.

An operation does not save a bias that it adds. The search finds the bias later through the graph, and its counter gives
only the present version. So versions are noted at the entry of a module, before operations read its leaves, with
autograd's sequence number. Versions only grow: a leaf that had its present version before a node was created had the
same version when that node's operation read it. Any other leaf's version is not known, and recipes do not read it.

[Note: No weak references] torch.utils.swap_tensors refuses a tensor that anybody refers to weakly, and with it
load_state_dict() and Module.to() under torch.__future__.set_swap_module_params_on_conversion(True). So a leaf is found
by the addresses of its object and of its implementation, and recognized by its version counter, which the note shares.
A tensor that has the same addresses later has another counter. To compare counters changes a version for a moment, so
an observation does it only for a leaf that another module had before; a search does it always.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vdnn.runtime.recompute.operation import Node
from vdnn.runtime.torch_internals.tensor_kinds import has_plain_storage, is_traced, num_dispatch_modes
from vdnn.runtime.torch_internals.version_counter import counter_of, same_counter

_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
_num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


@dataclass(slots=True, eq=False)
class _Seen:
    """A note. Only the thread that made it changes it."""

    implementation: int
    version: int
    sequence_nr: int
    counter: torch.Tensor  # a witness, see version_counter
    module: weakref.ref[torch.nn.Module] | None

    def is_of(self, leaf: torch.Tensor) -> bool:
        return self.implementation == leaf._cdata and same_counter(self.counter, leaf)


_Key = tuple[int, int]  # thread and id, because each thread has its own sequence numbers


class _Notes:
    """The notes of leaves. Nothing tells when a leaf is freed, so notes of which no leaf was observed for long end."""

    CAPACITY = 8192  # observations between a module's entry and its operations are far fewer

    def __init__(self) -> None:
        self._young: dict[_Key, _Seen] = {}
        self._old: dict[_Key, _Seen] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: _Key) -> _Seen | None:
        found = self._young.get(key)
        if found is None:
            found = self._old.pop(key, None)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: _Key, seen: _Seen) -> None:
        if len(self._young) >= self.CAPACITY:
            self._old, self._young = self._young, {}
        self._young[key] = seen

    def forget(self, key: _Key) -> None:
        self._young.pop(key, None)
        self._old.pop(key, None)


_notes = _Notes()


def observe(leaf: torch.Tensor, module: torch.nn.Module | None = None) -> int | None:
    """Note the present version of `leaf`, which `module` has. Call it before an operation of this thread may read the
    leaf, any number of times. Returns the version that was noted before; None if there was none."""
    key = (threading.get_ident(), id(leaf))
    known, version = _notes.get(key), leaf._version
    if known is not None:
        is_of_module = module is not None and known.module is not None and known.module() is module
        if (is_of_module and known.implementation == leaf._cdata) or known.is_of(leaf):
            before = known.version
            if before != version:
                known.version, known.sequence_nr = version, _sequence_nr()
            return before
    if has_plain_storage(leaf) and not is_traced():  # no recipe reads another leaf
        by = None if module is None else weakref.ref(module)
        _notes.put(key, _Seen(leaf._cdata, version, _sequence_nr(), _counter_of(leaf), by))
    return None


def observe_parameters(module: torch.nn.Module) -> None:
    """Observe the module's own parameters, in a hook before its forward."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.is_leaf and not parameter.is_inference():
            observe(parameter, module)


def _counter_of(leaf: torch.Tensor) -> torch.Tensor:
    if num_dispatch_modes() or _num_function_modes():  # user code's modes see no operation of ours
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return counter_of(leaf)
    return counter_of(leaf)


def version_read(leaf: torch.Tensor, node: Node) -> int | None:
    """The version that `node`'s operation read, if it is known to be the present one; else None. Call it on the
    operation's thread."""
    key = (threading.get_ident(), id(leaf))
    known = _notes.get(key)
    if known is None or known.version != leaf._version:
        return None
    if not known.is_of(leaf):
        _notes.forget(key)  # of a leaf that is freed
        return None
    return known.version if known.sequence_nr <= node._sequence_nr() else None


def reader_of(leaf: torch.Tensor) -> torch.nn.Module | None:
    """The module at whose call this thread noted the version of `leaf`, if that is known."""
    known = _notes.get((threading.get_ident(), id(leaf)))
    return None if known is None or known.module is None else known.module()
