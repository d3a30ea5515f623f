"""Lets a function of ours run before a torch function reads or writes one of some parameters.

A guarded parameter is the same object with another class, which has a `__torch_function__`. So torch asks it before
every function of Python that gets it, on every thread, alone or in a list: `detach` of a state_dict, `data`,
`data_ptr`, lists of foreach. Facts such as its shape need no values and are answered. Native code that unpacks a tensor
by itself does not ask; torch.func does so, see `transform_level` in tensor_kinds. A program that asks for the device of
a guarded parameter is told the one on which functions use it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Protocol

import torch

from vdnn.runtime.torch_internals.gradient_reads import set_native_gradient

_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "_version"),
    *("is_quantized", "is_nested", "is_meta", "is_cuda", "is_cpu", "is_sparse", "_base", "itemsize", "nbytes"),
    *("retains_grad", "output_nr", "_backward_hooks", "_post_accumulate_grad_hooks"),
)
_METHODS = (
    *("size", "dim", "stride", "numel", "nelement", "ndimension", "element_size", "storage_offset", "is_contiguous"),
    *("is_floating_point", "is_complex", "get_device", "_is_zerotensor", "requires_grad_", "__hash__", "is_inference"),
)
_WRITTEN = ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")
FACTS: frozenset[Any] = (
    frozenset(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES)
    | frozenset(getattr(torch.Tensor, name).__set__ for name in _WRITTEN)
    | frozenset(getattr(torch.Tensor, name) for name in _METHODS)
)


# The functions that tell the device of a parameter, and their answers for a parameter that is used on a device.
_DEVICE_FACTS: dict[Any, Callable[[torch.device], Any]] = {
    torch.Tensor.device.__get__: lambda device: device,
    torch.Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda device: device.index or 0,
}
_SET_GRADIENT: Any = torch._C.TensorBase.grad.__set__  # type: ignore[union-attr]
# Makes another parameter of the same memory from a parameter, and asks whether its detach() has the same class.
_NEW_PARAMETER = torch.nn.Parameter.__new__.__code__
_PACKAGES_THAT_NEED_THE_PLACE = ("torch", "vdnn")  # of the data now, as for an optimizer's groups by device
_COMPUTES = "torch.nn."  # but these compute with parameters, as a parametrization that checks for orthogonality

_OPERATORS = ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITING = frozenset(("__setitem__", "__set__", *(f"__i{name}__" for name in _OPERATORS)))


class ParameterGuard(Protocol):
    def before_use(self, parameter: torch.Tensor) -> None:
        """Called before a function gets `parameter`. The parameter is no longer guarded afterwards."""


class UseGuard(ParameterGuard, Protocol):
    """A guard that is also called ahead of the function, with all its parameters, and with its outcome."""

    def device_of(self, parameter: torch.Tensor) -> torch.device | None:
        """The device on which functions use `parameter`; None: where its data are."""

    def before_call(self, func: Callable[..., Any], parameters: list[torch.Tensor], caller: CodeType) -> bool:
        """`caller` is about to call the function. True: the parameters were brought to their device for it."""

    def becomes_another(self, parameter: torch.Tensor) -> None:
        """A program is about to make another parameter of the memory of `parameter`, which is no longer guarded."""

    def after_use(
        self, parameters: list[torch.Tensor], outcome: Any, error: Exception | None, *, writes: bool, brought: bool
    ) -> bool:
        """The function returned `outcome` or raised `error`. True: it is called once more."""


_lock = threading.Lock()
_guards: dict[int, ParameterGuard] = {}  # by id of the parameter, which its guard keeps alive


class GuardedParameter(torch.nn.Parameter):
    """A torch.nn.Parameter while it is guarded."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FACTS:
            if func in _DEVICE_FACTS and _asks_for_use(sys._getframe(1)):
                device = _device_of(args[0])
                if device is not None:
                    return _DEVICE_FACTS[func](device)
            if func == _SET_GRADIENT and isinstance(args[1], torch.Tensor):
                device = _device_of(args[0])
                with torch._C.DisableTorchFunctionSubclass():
                    set_native_gradient(args[0], args[1], device)
                return None
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.detach and sys._getframe(1).f_code is _NEW_PARAMETER:
            return _as_another(args[0])
        parameters = list(_guarded_in((*args, *kwargs.values())))
        guards = {id(known): known for one in parameters if (known := _guards.get(id(one))) is not None}
        asking: list[UseGuard] = [one for one in guards.values() if hasattr(one, "after_use")]  # type: ignore[misc]
        for parameter in parameters:
            ask(parameter)
        if any(_guarded_in((*args, *kwargs.values()))):
            raise RuntimeError(f"{func}: a parameter is still guarded")
        if not asking:
            return func(*args, **kwargs)
        parameters = list({id(one): one for one in parameters}.values())
        caller = sys._getframe(1).f_code
        brought = [one.before_call(func, parameters, caller) for one in asking]
        outcome, error = None, None
        try:
            outcome = func(*args, **kwargs)
        except RuntimeError as raised:  # such as two devices
            error = raised
        writes = is_in_place(func)
        again = [
            one.after_use(parameters, outcome, error, writes=writes, brought=was_brought)
            for one, was_brought in zip(asking, brought, strict=True)
        ]
        if any(again):
            return func(*args, **kwargs)
        if error is not None:
            raise error
        return outcome

    # What looks at the class of the parameter ahead of its values.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _as_one_use(self):
            return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _as_one_use(self):
            return self.__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        with _as_one_use(self):
            return self.__repr__(**options)


def _as_another(parameter: torch.Tensor) -> torch.Tensor:
    """Makes what `torch.nn.Parameter(parameter)` makes of a parameter that is not guarded."""
    known = _guards.get(id(parameter))
    ask(parameter)
    if hasattr(known, "becomes_another"):
        known.becomes_another(parameter)  # type: ignore[union-attr]
    return torch.Tensor._make_subclass(torch.nn.Parameter, parameter, False)


@contextlib.contextmanager
def _as_one_use(parameter: torch.Tensor) -> Iterator[None]:
    """A context in which `parameter` is not guarded. It is read on the host."""
    known = _guards.get(id(parameter))
    ask(parameter)
    try:
        yield
    finally:
        if hasattr(known, "after_use"):
            known.after_use([parameter], None, None, writes=False, brought=False)  # type: ignore[union-attr]


def _asks_for_use(frame: FrameType) -> bool:
    """True if a program asks, which wants to use the parameter there; False if torch or vdnn asks for the place."""
    name = frame.f_globals.get("__name__", "")
    return name.startswith(_COMPUTES) or name.split(".")[0] not in _PACKAGES_THAT_NEED_THE_PLACE


def _device_of(parameter: torch.Tensor) -> torch.device | None:
    known = _guards.get(id(parameter))
    return known.device_of(parameter) if hasattr(known, "device_of") else None  # type: ignore[union-attr]


def is_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITING


def ask(parameter: torch.Tensor) -> None:
    """Asks who guards `parameter`, if anybody does: it is not guarded afterwards."""
    known = _guards.get(id(parameter))
    if known is not None:
        known.before_use(parameter)
    elif type(parameter) is GuardedParameter:  # another thread is about to take the guard away
        parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]


def _guarded_in(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if type(value) is GuardedParameter:
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _guarded_in(value)
        elif isinstance(value, dict):
            yield from _guarded_in(value.values())


def guard(parameter: torch.nn.Parameter, by: ParameterGuard) -> None:
    """From now on `by`, which holds `parameter`, is asked before a function gets it. Its class has to be
    torch.nn.Parameter. torch.utils.swap_tensors asks nobody, see tensor_swaps."""
    with _lock:
        _guards[id(parameter)] = by
        parameter.__class__ = GuardedParameter


def guard_no_longer(parameter: torch.Tensor) -> None:
    with _lock:
        if _guards.pop(id(parameter), None) is not None:
            parameter.__class__ = torch.nn.Parameter


def is_guarded(parameter: object) -> bool:
    return type(parameter) is GuardedParameter
