"""Lets `.cpu()` and `.to("cpu")` copy tensors that are on the host in the place of a device.

What left the device is an ordinary tensor of the CPU (host_tensor.py). In plain PyTorch it is on the device, where
these methods copy it, and programs keep their best weights that way. But torch returns a tensor of the CPU itself,
which later steps would change. So while there is memory that stands for a device, these methods return a copy of a
tensor in it.

The methods of torch.Tensor are replaced for that time. A compiled region calls torch's own.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

_Base: Any = torch._C.TensorBase
_METHODS = ("cpu", "to", "type", "numpy")
_OPTIMIZERS = torch.optim.Optimizer.add_param_group.__code__.co_filename

_lock = threading.RLock()  # a finalizer may run while it is held
_addresses: set[int] = set()


def stands_for_device(address: int, holder: object) -> None:
    """Storages at this address are on the host in the place of a device, as long as `holder` lives."""
    with _lock:
        if not _addresses:
            for name in _METHODS:
                setattr(torch.Tensor, name, _replacements[name])
        _addresses.add(address)
    weakref.finalize(holder, _forget, address).atexit = False


def _forget(address: int) -> None:
    with _lock:
        _addresses.discard(address)
        if not _addresses:
            for name in _METHODS:
                if vars(torch.Tensor).get(name) is _replacements[name]:
                    delattr(torch.Tensor, name)


def _stands_for_device(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    try:
        return tensor.untyped_storage().data_ptr() in _addresses
    except (RuntimeError, NotImplementedError):  # it has no memory of its own
        return False


def _asks_for_cpu(device: Any) -> bool:
    if isinstance(device, torch.Tensor):
        return device.device.type == "cpu" and not _stands_for_device(device)
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu"


@functools.wraps(_Base.cpu)
def _cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    made: torch.Tensor = _Base.cpu(self, *args, **kwargs)
    return made.clone() if made is self and _stands_for_device(made) else made


@functools.wraps(_Base.to)
def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    made: torch.Tensor = _Base.to(self, *args, **kwargs)
    if made is not self:
        return made
    asked = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if not _asks_for_cpu(asked) or not _stands_for_device(made):
        return made
    # load_state_dict() asks for the device of a parameter, which is away as well: there torch keeps the tensor itself.
    is_loading = sys._getframe(1).f_code.co_filename == _OPTIMIZERS
    return made if is_loading else made.clone()


@functools.wraps(_Base.type)
def _type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    made = _Base.type(self, *args, **kwargs)
    if made is not self or isinstance(args[0] if args else kwargs.get("dtype"), torch.dtype):
        return made
    return made.clone() if _stands_for_device(self) else made  # a type of tensors names a device, too


@functools.wraps(_Base.numpy)
def _numpy(self: torch.Tensor, *, force: bool = False) -> Any:
    return _Base.numpy(self.clone() if force and _stands_for_device(self) else self, force=force)


_replacements: dict[str, Callable[..., Any]] = {"cpu": _cpu, "to": _to, "type": _type, "numpy": _numpy}
