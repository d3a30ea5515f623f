"""Runs an operation that was rehearsed before, on tensors of the same geometry, from what was noted then.

A model that loops over time calls the same few operations hundreds of thousands of times. Torch finds the geometry of
each result anew, through a key of all properties of all arguments, and the roofline its time. Here the geometry of the
arguments is the key of results, time and workspace. A memo holds what was seen below the dispatch modes: new tensors,
views of an argument, and arguments that were written to. An operation is noted only if nothing else can decide: no
value, no random number, no setting of torch that it reads.

Tests compare whole rehearsals with and without memos.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import flop_registry

from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.machine.workspaces import Workspace
from vdnn.runtime.torch_internals.fake_results import FakeResults

_aten = torch.ops.aten
_CPU = torch.device("cpu")
LIFTS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default, _aten.lift.default)
_MOST = 1 << 16  # the most noted results; a program with more geometries repeats little
_NOT_NOTED = frozenset(
    {
        # Their results depend on the size of a storage.
        _aten.as_strided.default,
        _aten.set_.source_Tensor,
        # Norms get their statistics from the rehearsal.
        _aten.native_layer_norm.default,
        _aten.native_batch_norm.default,
        # They bring a tensor of the program's own numbers.
        *LIFTS,
    }
)
_UNNOTED_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
    torch.Tag.inplace_view,
)
_VALUES: Final = frozenset(
    {int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, float}
)

_MISS: Any = object()
Rehearse = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
DependsOnValues = Callable[[list[torch.Tensor]], bool]
Follow = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


class _New(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _View(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    position: int  # of the argument


class _Written(NamedTuple):
    position: int


class _Outcome(NamedTuple):
    """The results of an operation, its time, and the workspace it takes."""

    results: tuple[_New | _View | _Written, ...]
    kind: type | None  # of the collection of results, or None for a tensor
    duration_ns: int | None  # None: it depends on a setting of torch
    workspace: Workspace | None


class _Repeated:
    """Holds what was noted of one operation, by the geometry of its arguments. None: that cannot be noted."""

    __slots__ = ("depends_on_values", "follow", "func", "is_mutable", "noted")

    def __init__(self, func: Any, depends_on_values: DependsOnValues | None, follow: Follow | None) -> None:
        self.func = func  # keeps its id
        self.depends_on_values = depends_on_values
        self.follow = follow
        self.is_mutable = func._schema.is_mutable
        self.noted: dict[object, _Outcome | None] = {}


class OperationMemo:
    """The operations of one rehearsal. `values_of(func)` gives two functions, each of them None where it is not needed.
    The first tells whether values of the arguments decide on the results: then nothing comes from the memo. The second
    is called with results that do. `values_of` gives None for an operation whose results always have values."""

    def __init__(
        self,
        machine: VirtualMachine,
        values_of: Callable[[Any], tuple[DependsOnValues | None, Follow | None] | None],
    ) -> None:
        self._machine = machine
        self._tracker = machine.tracker
        self._values_of = values_of
        self._of: dict[int, _Repeated | None] = {}  # by the id of an operation; None: it is not noted
        self._count = 0
        self._results: FakeResults | None = None
        self.hits = 0

    def enter(self, mode: FakeTensorMode) -> None:
        self._results = FakeResults(mode, _CPU)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rehearse: Rehearse) -> Any:
        """The results of the operation: from the memo, or from `rehearse`, which are noted if they can be."""
        operation = self._of.get(id(func), _MISS)
        if operation is _MISS:
            operation = self._of[id(func)] = self._operation(func)
        made = self._results
        if operation is None or made is None:
            return rehearse(func, args, kwargs)
        key, tensors = _key_of(args, kwargs)
        if key is None:
            return rehearse(func, args, kwargs)
        if operation.depends_on_values is not None and operation.depends_on_values(tensors):
            return rehearse(func, args, kwargs)
        found = operation.noted.get(key, _MISS)
        if found is None:
            return rehearse(func, args, kwargs)
        if found is not _MISS:
            out = self._again(found, made, func, args, kwargs, tensors)
            if operation.follow is not None:
                operation.follow(func, args, kwargs, out)
            return out
        out = rehearse(func, args, kwargs)
        if self._count == _MOST:
            self._of.clear()
            self._count = 0
        else:
            is_resized = operation.is_mutable and _key_of(args, kwargs)[0] != key  # `out=` of another shape
            operation.noted[key] = None if is_resized else self._note(func, args, kwargs, tensors, out)
            self._count += 1
        return out

    def detached(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The result of detach(), a fifth of all operations: each save makes one. None if it has to be rehearsed."""
        made = self._results
        if made is None or type(tensor) is not FakeTensor or not _is_simple(tensor):
            return None
        self.hits += 1
        self._machine.advance_by(0, None)
        return made.alias(tensor)

    def _operation(self, func: Any) -> _Repeated | None:
        if not isinstance(func, torch._ops.OpOverload) or not _may_be_noted(func):
            return None
        values = self._values_of(func)
        return None if values is None else _Repeated(func, *values)

    def _again(
        self,
        noted: _Outcome,
        made: FakeResults,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        self.hits += 1
        outs: list[torch.Tensor] = []
        for one in noted.results:
            if isinstance(one, _New):
                tensor = made.new(one.shape, one.stride, one.dtype)
                self._tracker.made(tensor.untyped_storage())
            elif isinstance(one, _View):
                tensor = made.view(tensors[one.position], one.shape, one.stride, one.dtype, one.offset)
            else:
                tensor = tensors[one.position]
            outs.append(tensor)
        out: Any = outs[0] if noted.kind is None else noted.kind(outs)
        if noted.duration_ns is None:
            self._machine.advance(func, args, kwargs, out)
        else:
            self._machine.advance_by(noted.duration_ns, noted.workspace)
        return out

    def _note(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], out: Any
    ) -> _Outcome | None:
        kind = None if isinstance(out, torch.Tensor) else type(out)
        if kind not in (None, tuple, list):
            return None
        results = []
        for one in (out,) if kind is None else out:
            result = _result_of(func, one, tensors)
            if result is None:
                return None
            results.append(result)
        # In float32, a product's time depends on the precision that torch is set to.
        is_set = func._overloadpacket in flop_registry or "attention" in func.name()
        if is_set and any(one.dtype is torch.float32 for one in tensors):
            return _Outcome(tuple(results), kind, None, None)
        return _Outcome(tuple(results), kind, *self._machine.cost_of(func, args, kwargs, out))


def _may_be_noted(func: Any) -> bool:
    if func in _NOT_NOTED or any(tag in func.tags for tag in _UNNOTED_TAGS) or not func.name().startswith("aten::"):
        return False
    # One of these may give a view or a copy.
    return not (
        func.is_view and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )


def _is_usual(tensor: Any) -> bool:
    return type(tensor) is FakeTensor and _is_simple(tensor) and not tensor.requires_grad


def _is_simple(tensor: FakeTensor) -> bool:
    """True if shape, strides, offset and dtype say all of it."""
    return (
        tensor.constant is None
        and tensor.fake_device == _CPU
        and tensor.layout is torch.strided
        and not (tensor.dtype.is_complex or tensor.is_neg() or tensor._is_zerotensor())
    )


def _result_of(func: Any, result: Any, tensors: list[torch.Tensor]) -> _New | _View | _Written | None:
    for position, one in enumerate(tensors):
        if one is result:
            return _Written(position) if func._schema.is_mutable else None
    if not _is_usual(result):
        return None
    shape, stride, storage = tuple(result.shape), result.stride(), result.untyped_storage()
    if func.is_view or func is _aten._unsafe_view.default:
        if storage._cdata != tensors[0].untyped_storage()._cdata:
            return None
        return _View(shape, stride, result.dtype, int(result.storage_offset()), 0)
    if any(storage._cdata == one.untyped_storage()._cdata for one in tensors):
        return None
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    nbytes = (last + 1) * result.itemsize if result.numel() else 0
    return _New(shape, stride, result.dtype) if storage.nbytes() == nbytes and not result.storage_offset() else None


def _key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object | None, list[torch.Tensor]]:
    """The geometries and values of the arguments, and the tensors among them. None for the key if an argument has
    other properties that could count."""
    parts: list[object] = [torch.is_inference_mode_enabled(), torch.get_default_dtype()]
    tensors: list[torch.Tensor] = []
    is_whole = _add(parts, tensors, args) and (not kwargs or _add_named(parts, tensors, kwargs))
    return (tuple(parts) if is_whole and tensors else None), tensors


def _add_named(parts: list[object], tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    parts.extend(kwargs)
    return _add(parts, tensors, kwargs.values())


def _add(parts: list[object], tensors: list[torch.Tensor], values: Any) -> bool:
    for one in values:
        kind = type(one)
        if kind is FakeTensor:
            if not _is_simple(one):
                return False
            parts += (one.shape, one.stride(), one.storage_offset(), one.dtype)
            tensors.append(one)
        elif kind in _VALUES:
            if one != one:
                return False  # NaN cannot be a key
            parts += (kind, one)
        elif kind is list or kind is tuple or kind is torch.Size:
            parts += (kind, len(one))
            if not _add(parts, tensors, one):
                return False
        else:
            return False
    return True
