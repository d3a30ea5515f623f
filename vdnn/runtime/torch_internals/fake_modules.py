"""Converts the parameters of modules on tensors without data: `.to(dtype)`, `.half()`, and off the meta device.

For FakeTensors torch's own Module._apply swaps two Python objects, and refuses if anything holds a weak reference to
one of them, as FakeTensorMode itself does. Here a parameter gets new data instead, as it does on a GPU, so it stays
the same object: tied parameters stay tied, and optimizers made before keep what they update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

_apply: Any = torch.nn.Module._apply


@contextlib.contextmanager
def fake_modules_can_be_converted() -> Iterator[None]:
    """A context in which modules whose parameters are FakeTensors can be converted. Not for several threads."""
    # A parameter can only be replaced when it leaves the meta device, so tied parameters are remembered.
    replaced = WeakIdKeyDictionary()

    def convert(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        if not any(isinstance(one, FakeTensor) for one in module._parameters.values()):
            return _apply(module, fn, recurse)
        if recurse:
            for child in module.children():
                child._apply(fn)  # type: ignore[no-untyped-call]
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _converted(parameter, fn, replaced)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    before = torch.nn.Module._apply
    torch.nn.Module._apply = convert  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = before  # type: ignore[method-assign]


def _converted(
    parameter: torch.nn.Parameter,
    fn: Callable[[torch.Tensor], torch.Tensor],
    replaced: Any,
) -> torch.nn.Parameter:
    known: torch.nn.Parameter | None = replaced.get(parameter)
    if known is not None:
        return known
    gradient = parameter.grad
    with torch.no_grad():
        data = fn(parameter)
        new_gradient = None if gradient is None else fn(gradient)
    if data is parameter:
        return parameter
    parameter.grad = None
    if data.device.type == parameter.device.type:
        parameter.data = data
        result = parameter
    else:  # torch refuses data of another kind of device
        result = torch.nn.Parameter(data, parameter.requires_grad)
        # A FakeTensor has its device here. Attributes that a library set on the parameter are copied.
        noted = {name: value for name, value in vars(parameter).items() if name not in vars(result)}
        vars(result).update(noted)
        replaced[parameter] = result
    result.grad = new_gradient
    return result


def materialize(module: torch.nn.Module) -> None:
    """Gives parameters and buffers on the meta device memory on the device of the rehearsal, still without data."""

    def with_memory(one: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(one, device="cpu") if one.device.type == "meta" else one

    module._apply(with_memory)  # type: ignore[no-untyped-call]
