"""Packs boolean masks into bits, and unpacks them. A boolean is a byte of 0 or 1.

The native core's kernels are registered as operations of torch. So tools that count operations count these too, with
their traffic and their results, with and without data.
"""

from __future__ import annotations

import weakref

import torch

from vdnn import _C
from vdnn.runtime.storage.transport import Transport

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


def pack_bits(mask: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Pack the storage that `mask` fills, whatever its strides are, on the current stream."""
    _transports[id(transport)] = transport
    bits: torch.Tensor = torch.ops.vdnn.pack_bits(mask, id(transport))
    return bits


def unpack_bits(bits: torch.Tensor, count: int, transport: Transport) -> torch.Tensor:
    _transports[id(transport)] = transport
    mask: torch.Tensor = torch.ops.vdnn.unpack_bits(bits, count, id(transport))
    return mask
