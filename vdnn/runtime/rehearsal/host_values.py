"""HostValues: lets a program that is rehearsed without data read the values that it asks for.

Small tensors that are made without data, such as positions, masks of ones and token ids, and what is computed from them
have their real values beside the tensors without data (known_values.py). Where a value or a size depends on data or
weights, the program gets a stand-in (stand_ins.py). Reading costs no time of the card here, as in the step's recording.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.dtype_checks import DtypeChecks
from vdnn.runtime.rehearsal.expectations import Expectations
from vdnn.runtime.rehearsal.known_values import MOST_BYTES, KnownValues
from vdnn.runtime.rehearsal.norm_statistics import NormStatistics
from vdnn.runtime.rehearsal.operation_memo import LIFTS, DependsOnValues, Follow, OperationMemo
from vdnn.runtime.rehearsal.stand_ins import StandIns
from vdnn.runtime.torch_internals.dispatch_entry import turns_dynamo_off
from vdnn.runtime.torch_internals.tensor_kinds import CLASSES_WITH_DATA

_aten = torch.ops.aten
_DETACH = _aten.detach.default
_DEFAULT_GPU, _CPU = torch.device("cuda"), torch.device("cpu")
_READS_OR_SIZES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
# These write every element of the tensor that they are called on, whatever it had before.
_OVERWRITES = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default, _aten.copy_.default)
# A scaler's check for infinities: its verdict stays as it was, so gradients are finite.
_KEEPS_VERDICT = _aten._amp_foreach_non_finite_check_and_unscale_.default


class HostValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode. Enter it after a virtual machine with tensors without data, on the same thread.

    `on_adopted(tensor)` is called with each tensor that stands for a real one which the program brought along. All new
    tensors that a program wants on a GPU are made on `device`. With a `machine`, operations that repeat run from a
    memo.
    """

    def __init__(
        self,
        on_adopted: Callable[[torch.Tensor], None] = lambda tensor: None,
        device: torch.device = _CPU,
        machine: VirtualMachine | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_adopted = on_adopted
        self._device = device
        self._known = KnownValues()
        self._expectations = Expectations()
        self.stand_ins = StandIns(self._expectations)
        self._dtypes = DtypeChecks()
        self.statistics = NormStatistics()
        self._mode: FakeTensorMode | None = None
        self.memo = OperationMemo(machine, self._values_of) if machine else None

    def __enter__(self) -> HostValues:
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        self._mode = mode if isinstance(mode, FakeTensorMode) else None
        if self.memo is not None and self._mode is not None:
            self.memo.enter(self._mode)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _values_of(self, func: OpOverload) -> tuple[DependsOnValues | None, Follow | None] | None:
        """Tells the memo when known or expected values of arguments decide on the values of results."""
        known, expectations = self._known, self._expectations
        if func.is_view:
            return None, None  # the values are those of the storage
        writes = func._schema.is_mutable
        if writes and func in _OVERWRITES and func is not _aten.copy_.default:
            return None
        # A write makes what was known unknown. Else the results are known if all arguments are.
        is_known = known.may_have_any if writes else known.may_have_all
        if not expectations.follows(func):
            return is_known, None

        def depends_on_values(tensors: list[torch.Tensor]) -> bool:
            return is_known(tensors) or any(map(expectations.has, tensors))

        return depends_on_values, expectations.follow if expectations.are_new(func) else None

    def array_of(self, tensor: torch.Tensor) -> Any:
        """A numpy array of the known values, or of the expected ones."""
        with _disable_current_modes():
            known = self._known.of(tensor)
            if known is None:
                known = torch.full(tensor.shape, self._expectations.of(tensor).mean or 0, dtype=tensor.dtype)
            return known.detach().clone().numpy()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the entry does

    @turns_dynamo_off
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if kind is not FakeTensor and hasattr(kind, "__tensor_flatten__"):
                return NotImplemented  # a wrapper runs first, and calls this for what it wraps
        if not kwargs:
            kwargs = {}
        elif kwargs.get("device") == _DEFAULT_GPU:  # from torch.set_default_device
            kwargs = {**kwargs, "device": self._device}
        # In a backward pass the function modes of the stage are active here, in a forward pass they are not.
        with torch._C.DisableTorchFunction():
            if self.memo is None:
                return self._anew(func, args, kwargs)
            if func is _DETACH:
                detached = self.memo.detached(args[0])
                if detached is not None:
                    return detached
            return self.memo.run(func, args, kwargs, self._anew)

    def _anew(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        return self._lifted(func, args[0]) if func in LIFTS else self._rehearsed(func, args, kwargs)

    def _rehearsed(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.is_view and type(args[0]) is FakeTensor:
            return func(*args, **kwargs)  # the values are those of the storage
        leaves, spec = tree_flatten((args, kwargs))
        if any(isinstance(one, torch.Tensor) and type(one) is not FakeTensor for one in leaves):
            leaves = [self._adopted(one) if isinstance(one, torch.Tensor) else one for one in leaves]
            args, kwargs = tree_unflatten(leaves, spec)
        self._dtypes.require_accepted(func, args, kwargs, leaves)
        tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
        all_known = all(one in self._known for one in tensors)
        if _asks_for_data(func, args):
            real = self._computed(func, leaves, spec) if all_known else None
            if real is not None:
                return tree_map_only(torch.Tensor, self._without_data, real[0])
            if self.stand_ins.answers(func):
                if func is _aten.nonzero.default and self._chooses_all(args[0]):
                    with no_dispatch():
                        all_chosen = torch.ones(args[0].shape, dtype=torch.bool).nonzero()
                    return self._without_data(all_chosen)
                return self.stand_ins.answer(func, args, kwargs)
            return func(*args, **kwargs)
        out = self.statistics.shaped(func, args, func(*args, **kwargs))
        written = _written(func)
        if written:
            self._follow_write(func, written, args, kwargs, (leaves, spec), all_known)
        elif all_known:
            self._follow(func, leaves, spec, out)
        if not all_known or _is_random(func):
            self._expectations.follow(func, args, kwargs, out)
        return out

    def _follow(self, func: Any, leaves: list[Any], spec: Any, out: Any) -> None:
        """Computes the values of results from known arguments."""
        made = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        if not made or any(one.numel() * one.itemsize > MOST_BYTES or one.device.type == "meta" for one in made):
            return
        if "empty" in func._overloadpacket.__name__ or (_is_random(func) and made[0].dtype is not torch.int64):
            return  # to be written to, or drawn in floating point: data or weights
        real = self._computed(func, leaves, spec)
        if real is None:
            return
        with no_dispatch():
            for one, values in zip(made, (one for one in tree_leaves(real[0]) if torch.is_tensor(one)), strict=True):
                self._known.learn(one, values)

    def _follow_write(
        self,
        func: Any,
        written: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        flat: tuple[list[Any], Any],
        all_known: bool,
    ) -> None:
        """Writes known values through, or forgets what was written to."""
        names = (argument.name for argument in func._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        targets = [one for name in written for one in tree_leaves(given.get(name)) if isinstance(one, torch.Tensor)]
        if func is _KEEPS_VERDICT:
            targets = [one for one in targets if one.dim()]
            all_known = False
        if func in _OVERWRITES and not all_known:
            others = [one for one in flat[0] if isinstance(one, torch.Tensor) and one is not args[0]]
            if all(one in self._known for one in others):
                with no_dispatch():
                    all_known = self._known.learn(args[0]) is not None
        is_drawn = _is_random(func) and bool(targets) and targets[0].dtype is not torch.int64
        if not all_known or is_drawn or self._computed(func, *flat) is None:
            self._known.forget(targets)

    def _computed(self, func: Any, leaves: list[Any], spec: Any) -> tuple[Any] | None:
        """The result on the known values, or None if it cannot be computed."""
        with no_dispatch():
            real = [self._known.of(one) if isinstance(one, torch.Tensor) else _on_the_host(one) for one in leaves]
            args, kwargs = tree_unflatten(real, spec)
            try:
                return (func(*args, **kwargs),)
            except Exception:
                return None

    def _chooses_all(self, mask: torch.Tensor) -> bool:
        """True for a mask such as that of the experts which any token goes to: its indices are known."""
        mean = self._expectations.of(mask).mean
        return mean is not None and mean >= 1 and mask.numel() * mask.dim() * 8 <= MOST_BYTES

    def _without_data(self, real: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=self._device)
        with no_dispatch():
            self._known.learn(made, real)
        return made

    def _lifted(self, func: Any, tensor: torch.Tensor) -> Any:
        """A tensor that the program made of Python numbers."""
        out = func(tensor)
        if not isinstance(tensor, FakeTensor) and isinstance(out, torch.Tensor):
            with no_dispatch():
                self._known.learn(out, tensor)
        return out

    def _adopted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stands for a real tensor of the program, which is not changed. The same one each time."""
        if self._mode is None or type(tensor) not in CLASSES_WITH_DATA:
            return tensor
        is_new = self._mode.fake_tensor_converter._get_memo(tensor) is None
        made = self._mode.from_tensor(tensor)
        if is_new:
            self._on_adopted(made)
            with no_dispatch():
                if tensor.device.type == "cpu" and not isinstance(tensor, torch.nn.Parameter):
                    self._known.learn(made, tensor)
        return made


def _on_the_host(value: Any) -> Any:
    return _CPU if isinstance(value, torch.device) and value.type == "cuda" else value


@functools.cache
def _written(func: OpOverload) -> tuple[str, ...]:
    """The names of the arguments that an operation writes to."""
    return tuple(one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write)


@functools.cache
def _is_random(func: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@functools.cache
def _depends_on_data(func: OpOverload) -> bool:
    return any(tag in func.tags for tag in _READS_OR_SIZES)


def _asks_for_data(func: OpOverload, args: tuple[Any, ...]) -> bool:
    if func is _aten.index.Tensor:  # its size depends on data only with a mask
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return _depends_on_data(func)
