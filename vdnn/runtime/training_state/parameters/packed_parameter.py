"""Packs a saved view of a managed parameter: autograd holds where it is in the parameter, and its geometry."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vdnn.errors import VdnnError
from vdnn.runtime.storage.kept import unpack_without_hooks
from vdnn.runtime.torch_internals import forks
from vdnn.runtime.torch_internals.cuda_graphs import keep_dynamo_out
from vdnn.runtime.torch_internals.hooks_of_others import memory_of
from vdnn.runtime.torch_internals.tensor_kinds import outside_of_transforms
from vdnn.runtime.torch_internals.version_counter import raise_modified
from vdnn.runtime.training_state.parameters.away_parameter import AwayParameter


class ParametersOfASession(Protocol):
    """Manages the parameters of one session."""

    def let_all_stay(self, reason: str) -> None:
        """All of them return to the device and are not managed any more."""


class SavedUses(Protocol):
    """Brings the parameters of one session to the device for the uses of their saves."""

    def use_saved(self, away: AwayParameter, *, is_present: bool) -> torch.Tensor: ...


Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class PackedParameter:
    """A view of `away`, saved at `version` of the parameter. `is_itself`: the parameter was saved, and no view of it.

    [Note: Data that are replaced] Where a graph saved the parameter itself, torch's backward uses the data that the
    parameter has then, also those of `parameter.data = ...`. A view keeps the memory that it is of."""

    away: AwayParameter
    uses: SavedUses
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    version: int
    replaced: int
    is_itself: bool
    forks: int

    def unpack(self) -> torch.Tensor:
        """Blocks no longer than it takes to issue a copy. The tensor may be used on the current stream."""
        found = self.away.parameter._version
        if found != self.version:
            raise_modified(self.away.parameter.type(), self.size, found, self.version)
        if not self.is_itself and self.away.replaced != self.replaced:
            raise VdnnError(
                f"the data of parameter {self.away.name} were replaced (parameter.data = ...) between a forward pass "
                "and its backward, which needs those of before. They have no memory any more under parameters=. "
                "Replace them ahead of the forward pass or behind the backward, or write to them in place."
            )
        with torch.no_grad(), outside_of_transforms():
            # A forked child has no device; it reads the host copy.
            if forks.count == self.forks:
                whole = self.uses.use_saved(self.away, is_present=self.is_itself)
            else:
                whole = self.away.host.tensor
            part = whole if whole.dtype is self.dtype else whole.view(self.dtype)
            return part.as_strided(self.size, self.stride, part.storage_offset() + self.offset)


class ParameterSaves:
    """The hooks of an engine whose sessions manage parameters: views of these are packed here, other saves by the hooks
    that were there."""

    def __init__(self) -> None:
        self._pack: Pack = lambda tensor: tensor
        self._unpack: Unpack = lambda packed: packed
        self._on_device: dict[int, tuple[AwayParameter, weakref.ref[SavedUses]]] = {}  # by address of their storage
        self._managers: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # in the order of sessions

    def managed_by(self, manager: ParametersOfASession) -> None:
        """`manager` has parameters that these hooks pack."""
        self._managers[manager] = None

    def managers(self) -> list[Any]:
        return list(self._managers)

    def let_all_stay(self, reason: str) -> None:
        """Returns all managed parameters to the device for good: hooks are about to be left out of graphs."""
        for manager in list(self._managers):
            manager.let_all_stay(reason)

    def around(self, hooks: Any) -> tuple[Pack, Unpack]:
        """The hooks to install in place of `hooks.pack` and `hooks.unpack`."""
        self._pack, self._unpack = hooks.pack, hooks.unpack
        return self.pack, self.unpack

    def cut(self) -> None:
        """Called if the engine is freed while graphs still hold kept tensors and parameters."""
        self._unpack = unpack_without_hooks
        del self._pack

    def add(self, away: AwayParameter, uses: SavedUses) -> None:
        self._on_device[away.native_address] = (away, weakref.ref(uses))

    def remove(self, away: AwayParameter) -> None:
        if self._on_device.get(away.native_address, (None,))[0] is away:
            del self._on_device[away.native_address]

    def pack(self, tensor: torch.Tensor) -> Any:
        if not self._on_device:
            return self._pack(memory_of(tensor))
        try:
            found = self._on_device.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # a tensor without storage: sparse, or wrapped by torch.func
            found = None
        uses = None if found is None else found[1]()
        if found is None or uses is None or tensor.is_conj() or tensor.is_neg():
            return self._pack(memory_of(tensor))  # of a parameter that a session around this one streams
        away = found[0]
        return PackedParameter(
            away,
            uses,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            away.parameter._version,
            away.replaced,
            tensor is away.parameter,
            forks.count,
        )

    def unpack(self, packed: Any) -> torch.Tensor:
        return packed.unpack() if type(packed) is PackedParameter else self._unpack(packed)


def hooks_of(hooks: Any, parameters: ParameterSaves | None) -> tuple[Pack, Unpack]:
    """The hooks to install: `hooks.pack` and `hooks.unpack`, or those of `parameters` around them."""
    return (hooks.pack, hooks.unpack) if parameters is None else parameters.around(hooks)


keep_dynamo_out(ParameterSaves.pack)
keep_dynamo_out(ParameterSaves.unpack)
