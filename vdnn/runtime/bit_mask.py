"""Masks as bits: an eighth of a saved mask stays on the device in its place, and the mask is made of it again.

Lossless by the type alone: a boolean is 0 or 1. The kernels are the native core's; torch sees them as operations of its
own, so that whatever counts operations counts these, with their traffic and their results, with and without data.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vdnn import _C
from vdnn.runtime.transport import Transport

NAME = "bits"
_PER_BYTE = 8

_library = torch.library.Library("vdnn", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("pack_bits(Tensor mask, int transport) -> Tensor")  # type: ignore[no-untyped-call]
_library.define("unpack_bits(Tensor bits, int count, int transport) -> Tensor")  # type: ignore[no-untyped-call]
_transports: weakref.WeakValueDictionary[int, Transport] = weakref.WeakValueDictionary()


def packed_bytes(count: int) -> int:
    return -(-count // _PER_BYTE)


def _pack(mask: torch.Tensor, transport: int) -> torch.Tensor:
    bits = torch.empty(packed_bytes(mask.numel()), dtype=torch.uint8, device=mask.device)
    _launch(transport, _C.Kernel.PACK_BITS, mask, bits, mask.numel())
    return bits


def _unpack(bits: torch.Tensor, count: int, transport: int) -> torch.Tensor:
    mask = torch.empty(count, dtype=torch.bool, device=bits.device)
    _launch(transport, _C.Kernel.UNPACK_BITS, bits, mask, count)
    return mask


def _launch(key: int, kernel: _C.Kernel, source: torch.Tensor, target: torch.Tensor, count: int) -> None:
    transport = _transports[key]
    call = _C.KernelCall(kernel, source.data_ptr(), target.data_ptr(), count)
    transport.device.launch(call, transport.current_stream())


_library.impl("pack_bits", _pack, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("unpack_bits", _unpack, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _fake_pack(mask: torch.Tensor, transport: int) -> torch.Tensor:
    return mask.new_empty(packed_bytes(mask.numel()), dtype=torch.uint8)


def _fake_unpack(bits: torch.Tensor, count: int, transport: int) -> torch.Tensor:
    return bits.new_empty(count, dtype=torch.bool)


torch.library.register_fake("vdnn::pack_bits", _fake_pack, lib=_library)
torch.library.register_fake("vdnn::unpack_bits", _fake_unpack, lib=_library)


class BitMask:
    """What is left of a mask, and how the mask is made of it: a recipe that reads nothing else."""

    name = NAME
    operands: Sequence[Any] = ()

    def __init__(self, mask: torch.Tensor, transport: Transport) -> None:
        """Packs the storage that `mask` fills, on the current stream."""
        self._count = mask.numel()
        self._transport = id(transport)
        _transports[id(transport)] = transport
        with torch.no_grad():
            self._bits: torch.Tensor = torch.ops.vdnn.pack_bits(mask, self._transport)

    @property
    def kept_bytes(self) -> int:
        return packed_bytes(self._count)

    @property
    def signature(self) -> tuple[str, int]:
        return NAME, self._count

    def rebuild(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            mask: torch.Tensor = torch.ops.vdnn.unpack_bits(self._bits, self._count, self._transport)
        return mask


def can_be_packed(tensor: torch.Tensor) -> bool:
    """A mask in memory that the native core can reach."""
    return tensor.dtype is torch.bool and tensor.device.type in ("cpu", "cuda")
