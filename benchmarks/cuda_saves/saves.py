"""The saves of one forward pass: of a rehearsal on CPU tensors, and of torch's CUDA operations on tensors without data.

Both run the same function of a batch size. The CUDA side makes the model as the rehearsal does, moves it, and calls its
loss. Without a GPU torch refuses to choose a fused attention, so there the rehearsal's choice is taken; with one the
choice is torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.attention_masks import masks_as_on_a_gpu
from vdnn.runtime.rehearsal.fused_attention import attend
from vdnn.runtime.rehearsal.gpu_calls import gpu_calls
from vdnn.runtime.rehearsal.host_values import HostValues
from vdnn.runtime.rehearsal.stage import stage
from vdnn.runtime.rehearsal.subjects import subject_of
from vdnn.runtime.torch_internals.fake_modules import fake_modules_can_be_converted
from vdnn.runtime.torch_internals.random_state import same_random_numbers

_CUDA = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Save:
    """A storage that autograd saved, with the tensor that was saved first on it."""

    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.nbytes} bytes as {self.dtype} {list(self.shape)}"


def rehearsed_saves(make: Callable[[int], Any], batch: int, precision: torch.dtype | None = None) -> list[Save]:
    """The saves as a rehearsal for an H100 has them, each storage once, without parameters, in order. With `precision`
    the forward pass runs under autocast in that dtype."""
    with VirtualMachine("h100") as machine, stage(machine):
        staged = subject_of(make, batch).make()
        if staged.compute_loss is None:
            raise TypeError("expected a function that returns a model and its inputs, got one with a step of its own")
        with contextlib.nullcontext() if precision is None else torch.autocast("cuda", precision):
            return _saves_of(staged.compute_loss, staged.model)


def cuda_saves(make: Callable[[int], Any], batch: int, precision: torch.dtype | None = None) -> list[Save]:
    """The saves of torch's operations for CUDA, each storage once, without parameters, in order."""
    values = HostValues(device=_CUDA)
    with contextlib.ExitStack() as stack:
        for context in (FakeTensorMode(), same_random_numbers(), fake_modules_can_be_converted(), masks_as_on_a_gpu()):
            stack.enter_context(context)
        stack.enter_context(gpu_calls(casts_here=False))
        stack.enter_context(values)
        with _MadeOnTheHost():
            staged = subject_of(make, batch).make()
        if staged.compute_loss is None:
            raise TypeError("expected a function that returns a model and its inputs, got one with a step of its own")
        staged.model.to(_CUDA)
        _move_closed_over(staged.compute_loss, {})
        with torch.device(_CUDA), _attention(), _autocast_on_cuda(precision):
            return _saves_of(staged.compute_loss, staged.model)


@contextlib.contextmanager
def _autocast_on_cuda(precision: torch.dtype | None) -> Iterator[None]:
    """torch.autocast turns itself off where there is no GPU, so this sets what it sets."""
    if precision is None:
        yield
        return
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", precision)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
        torch.clear_autocast_cache()


class _MadeOnTheHost(TorchFunctionMode):
    """A model is made on the host, whatever device it names, and moved afterwards."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cuda, torch.nn.Module.cuda):
            return args[0]
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = tuple("cpu" if str(one) == "cuda" else one for one in args)
        return func(*args, **kwargs)


class _ChosenAttention(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if torch.cuda.is_available() else _ChosenAttention()


def _move_closed_over(function: Any, moved: dict[int, torch.Tensor]) -> None:
    """Moves the inputs and targets that a loss holds in its closures and in the objects there. `moved` has those that
    were moved before."""
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        if isinstance(held, torch.nn.Module):
            continue
        if callable(held) and getattr(held, "__closure__", None):
            _move_closed_over(held, moved)
        elif callable(held) and hasattr(held, "__dict__"):
            _move_attributes(held, moved)
        else:
            cell.cell_contents = _moved(held, moved)


def _move_attributes(held: Any, moved: dict[int, torch.Tensor]) -> None:
    for name, value in list(vars(held).items()):
        if callable(value) and hasattr(value, "__dict__"):
            _move_attributes(value, moved)
        else:
            object.__setattr__(held, name, _moved(value, moved))


def _moved(value: Any, moved: dict[int, torch.Tensor]) -> Any:
    return tree_map_only(torch.Tensor, lambda one: moved.setdefault(id(one), one.to(_CUDA)), value)


def _saves_of(compute_loss: Callable[[], torch.Tensor], model: torch.nn.Module) -> list[Save]:
    kept = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
    # Storages are held, so that no two have the same address.
    found: dict[int, tuple[Any, Save]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept and storage._cdata not in found:
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[storage._cdata] = storage, Save(storage.nbytes(), dtype, tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        loss = compute_loss()
    del loss
    return [save for _, save in found.values()]
