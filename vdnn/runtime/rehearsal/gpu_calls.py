"""Lets a program that names its GPU run in a rehearsal, where CPU tensors without data stand for those of the card.

tensors and modules   `.to("cuda")`, `.cuda()`, `device="cuda"` and `.pin_memory()` leave them where they are.
mixed precision       `torch.autocast("cuda")` and `GradScaler("cuda")` apply to the CPU tensors, and autocast casts as
                      on CUDA (cuda_autocast.py). Without this, torch would turn both off, and a step in mixed
                      precision would be planned as one in float32.
torch.cuda            `synchronize()`, `set_device()` and the like do nothing.
numpy                 `.numpy()` gives the known values, or the expected ones.
formats               `f"{loss:.3f}"` formats the number that `.item()` gives. Torch does so for no subclass of Tensor.
data                  `p.data = other` makes FakeTensorMode forget the number that it had read of `p`.
copies                `copy.deepcopy()` of a model, as for an average of its weights. Torch cannot copy a storage
                      without data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler

from vdnn.runtime.rehearsal.cuda_autocast import CudaAutocast
from vdnn.runtime.rehearsal.cuda_shaped import CudaShaped
from vdnn.runtime.rehearsal.norm_statistics import NormStatistics

_HERE = "cpu"
_STAYS = frozenset({torch.Tensor.cuda, torch.Tensor.pin_memory})
_ARRAYS: tuple[Any, ...] = (torch.Tensor.numpy, torch.Tensor.__array__)
_SETS_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SPECIAL = frozenset({torch.device, torch.Tensor.__deepcopy__, torch.Tensor.__format__, _SETS_DATA, *_STAYS, *_ARRAYS})
_NAMES_A_DEVICE = frozenset({str, torch.device})
_QUIET = ("synchronize", "set_device", "reset_peak_memory_stats", "reset_max_memory_allocated", "empty_cache")


class OnTheCard(CudaShaped):
    """Replaces a GPU among the arguments of any function of torch by the device of the rehearsal, and translates the
    function as CudaShaped does. One mode, because each takes 2 us of every function."""

    def __init__(self, array_of: Callable[[torch.Tensor], Any], *, is_ampere: bool, statistics: NormStatistics) -> None:
        super().__init__(is_ampere=is_ampere, statistics=statistics)
        self._array_of = array_of

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SPECIAL:
            if func is torch.device:
                return func(*args, **(kwargs or {}))  # the program may look at its type
            if func in _STAYS:
                return args[0]
            if func in _ARRAYS:
                return self._array_of(args[0])
            if func is torch.Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
                return _copied(*args)
            if func is torch.Tensor.__format__ and _is_number(args[0]):
                return format(args[0].detach().item(), *args[1:])
            if func == _SETS_DATA and isinstance(args[0], FakeTensor):
                args[0].constant = getattr(args[1], "constant", None)
        for one in args:
            if type(one) in _NAMES_A_DEVICE and _is_gpu(one):
                args = tuple(_HERE if _is_gpu(one) else one for one in args)
                break
        if kwargs and _is_gpu(kwargs.get("device")):
            kwargs = {**kwargs, "device": _HERE}
        return self.translated(func, args, kwargs or {})


def _is_gpu(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def _is_number(tensor: torch.Tensor) -> bool:
    return type(tensor) is FakeTensor and not tensor.dim() and not isinstance(tensor, torch.nn.Parameter)


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:
        made = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made)
        made.requires_grad_(tensor.requires_grad)
        # A FakeTensor has its own state here too. Attributes that a library set on the tensor are copied.
        vars(made).update({name: value for name, value in vars(tensor).items() if name not in vars(made)})
        memo[id(tensor)] = made
    copied: torch.Tensor = memo[id(tensor)]
    return copied


@contextlib.contextmanager
def gpu_calls(*, casts_here: bool = True) -> Iterator[None]:
    """A context in which mixed precision and functions of torch.cuda work without a GPU. Not for several threads. If
    not `casts_here`, autocast on CUDA is left alone, for tensors without data that are on CUDA."""
    originals = {name: getattr(torch.cuda, name) for name in (*_QUIET, "current_device")}
    start_autocast, start_scaler = autocast.__init__, GradScaler.__init__
    casts = CudaAutocast()

    def autocast_here(context: autocast, device_type: str, dtype: torch.dtype | None = None, **options: Any) -> None:
        if casts_here:
            casts.install()
            if device_type == "cuda":
                device_type, dtype = _HERE, dtype or torch.get_autocast_dtype("cuda")
        start_autocast(context, device_type, dtype, **options)

    def scaler_here(scaler: GradScaler, device: str = "cuda", *arguments: Any, **options: Any) -> None:
        start_scaler(scaler, _HERE if device == "cuda" else device, *arguments, **options)

    autocast.__init__ = autocast_here  # type: ignore[method-assign, assignment]
    GradScaler.__init__ = scaler_here  # type: ignore[method-assign, assignment]
    for name in _QUIET:
        setattr(torch.cuda, name, lambda *arguments, **options: None)
    torch.cuda.current_device = lambda: 0
    try:
        yield
    finally:
        casts.remove()
        autocast.__init__, GradScaler.__init__ = start_autocast, start_scaler  # type: ignore[method-assign]
        for name, original in originals.items():
            setattr(torch.cuda, name, original)
