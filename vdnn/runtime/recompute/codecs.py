"""Codecs: encode a storage in fewer bytes and decode it again. Masks become bits, floats get fewer bits.

Plans may use the lossless codecs. The lossy ones are used only if the user names them; each states its error bound. A
codec is a recipe whose only operand is its encoded bytes. Those are a managed storage, so they may be offloaded too.
See docs/recompute.md.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from vdnn import _C
from vdnn.runtime.storage.counters import Counters
from vdnn.runtime.storage.facts import Geometry, StorageFacts, is_dense
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.packed_view import PackedView
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.version_counter import counter_of

_BLOCK = 128  # values that share a scale
_SCALE_BYTES = 4
_FLOAT8_LARGEST = 448.0
_FLOAT8_LEAST = 2.0**-135  # the least code at the least scale
_BFLOAT16_LEAST = 2.0**-133


class Codec(ABC):
    """One encoded storage. `tensor` fills the storage that is encoded, on the current stream."""

    name: ClassVar[str]
    is_exact: ClassVar[bool]
    is_exact_in_bytes: ClassVar[bool] = False  # it decodes the values of one dtype
    nodes: ClassVar[tuple[int, ...]] = ()  # it reads no node
    shapeless: ClassVar[None] = None
    num_unpacked: ClassVar[int] = 1

    def __init__(self, tensor: torch.Tensor, transport: Transport, counters: Counters) -> None:
        self._geometry: Geometry = (tensor.dtype, tensor.size(), tensor.stride())
        self._count = tensor.numel()
        self._transport = transport
        with torch.no_grad():
            kept = self._encoded(tensor)
        storage, witness = kept.untyped_storage(), counter_of(kept)
        geometry, stream = (kept.dtype, kept.size(), kept.stride()), transport.current_stream()
        facts = StorageFacts(
            transport.address_of(storage), 0, storage.nbytes(), stream, geometry, is_dense(kept), None, counters
        )
        self.managed = managed = ManagedStorage(transport, storage, facts, witness)
        self.operands = self.given = (PackedView(managed, kept, witness, geometry, managed.facts.begin),)
        self.light_operands: tuple[_C.LightSave, ...] = ()
        self.sources = (managed,)
        managed.views -= 1  # the discard that uses the codec counts the view that exists
        managed.keep_reloaded()  # another backward may decode it again

    @staticmethod
    @abstractmethod
    def takes(tensor: torch.Tensor) -> bool: ...

    @staticmethod
    def runs_on(transport: Transport) -> bool:
        """True if the codec can run on this device."""
        return True

    @staticmethod
    def admits(values: torch.Tensor) -> bool:
        """True if the codec can represent these values. Called for each storage, so it must not make the host wait for
        a GPU."""
        return True

    @abstractmethod
    def _encoded(self, tensor: torch.Tensor) -> torch.Tensor:
        """The encoded values, alone in their storage."""

    @abstractmethod
    def _decoded(self, kept: torch.Tensor) -> torch.Tensor:
        """A tensor whose storage is the one that was encoded."""

    @abstractmethod
    def is_close(self, original: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """True if every value is within the bound. Both tensors are flat."""

    @property
    def kept_bytes(self) -> int:
        return self.managed.nbytes

    @property
    def result_bytes(self) -> int:
        """The bytes that decoding takes."""
        dtype, size, _ = self._geometry
        return math.prod(size) * dtype.itemsize

    @property
    def signature(self) -> tuple[str, Geometry]:
        return self.name, self._geometry

    def recompute(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        kept = unpack(self.operands[0])
        with torch.no_grad():
            return self._decoded(kept)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """All values of the tensor's storage, in storage order."""
        return tensor.as_strided((self._count,), (1,), 0)


class Bits(Codec):
    """Booleans, eight in a byte. Lossless for the bytes that torch's operations write: 0 and 1. Integers viewed as
    booleans may have other bytes: `admits` refuses them on the CPU, and on a GPU a recheck finds them."""

    name = "bits"
    is_exact = True

    @staticmethod
    def takes(tensor: torch.Tensor) -> bool:
        return tensor.dtype is torch.bool and tensor.device.type in ("cpu", "cuda")

    @staticmethod
    def runs_on(transport: Transport) -> bool:
        return transport.has_kernels

    @staticmethod
    def admits(values: torch.Tensor) -> bool:
        if type(values) is FakeTensor or values.device.type != "cpu":
            return True
        with no_dispatch():
            return bool(values.view(torch.uint8).max() <= 1)

    def _encoded(self, tensor: torch.Tensor) -> torch.Tensor:
        return pack_bits(tensor, self._transport)

    def _decoded(self, kept: torch.Tensor) -> torch.Tensor:
        return unpack_bits(kept, self._count, self._transport)

    def is_close(self, original: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return (original == made).all()


class BFloat16(Codec):
    """Floats of 32 or 64 bits as bfloat16. The error is at most a 256th of the value, or 2^-134."""

    name = "bf16"
    is_exact = False

    @staticmethod
    def takes(tensor: torch.Tensor) -> bool:
        return tensor.dtype in (torch.float32, torch.float64)

    def _encoded(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.flat(tensor).to(torch.bfloat16)

    def _decoded(self, kept: torch.Tensor) -> torch.Tensor:
        return kept.to(self._geometry[0])

    def is_close(self, original: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return _is_within(original, made, (original.abs() / 256).clamp_min(_BFLOAT16_LEAST / 2))


class Float8(Codec):
    """Floats as eight bits (e4m3), with a scale for every 128. The error is at most a sixteenth of the value, or 2^-18
    of the largest of its 128, or 2^-135.

    [Note: Not finite] Masks write -inf into scores, in some steps only. The format has no infinity: its NaN stands for
    -inf, which does not count for the scale. NaN and +inf, behind which no step is of use, make NaN of their 128."""

    name = "fp8"
    is_exact = False

    @staticmethod
    def takes(tensor: torch.Tensor) -> bool:
        return tensor.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)

    def _encoded(self, tensor: torch.Tensor) -> torch.Tensor:
        values = self._in_blocks(self.flat(tensor)).to(torch.float32)
        kept = torch.empty(len(values) * (_SCALE_BYTES + _BLOCK), dtype=torch.uint8, device=tensor.device)
        scales, codes = self._parts(kept)
        largest = values.nan_to_num(nan=math.nan, posinf=math.nan, neginf=0.0).abs_().amax(1, keepdim=True)
        scales.copy_(largest / _FLOAT8_LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        # Torch converts infinities to the largest number in one place and to NaN in another.
        codes.copy_(values.nan_to_num(nan=math.nan, posinf=math.nan, neginf=math.nan).div_(scales))
        return kept

    def _parts(self, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale of each block and the codes of each block, which share one storage."""
        split = len(kept) // (_SCALE_BYTES + _BLOCK) * _SCALE_BYTES
        scales, codes = kept[:split].view(torch.float32), kept[split:].view(torch.float8_e4m3fn)
        return scales.view(-1, 1), codes.view(-1, _BLOCK)

    def _in_blocks(self, values: torch.Tensor) -> torch.Tensor:
        missing = -self._count % _BLOCK
        return torch.nn.functional.pad(values, (0, missing)).view(-1, _BLOCK)

    def _decoded(self, kept: torch.Tensor) -> torch.Tensor:
        scales, codes = self._parts(kept)
        values = codes.to(torch.float32).nan_to_num_(nan=-math.inf, neginf=-math.inf)  # see [Note: Not finite]
        values = (values * scales).to(self._geometry[0])
        return values.view(-1)[: self._count].clone() if self._count % _BLOCK else values

    def is_close(self, original: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        finite = self._in_blocks(original).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        largest = finite.abs_().amax(1, keepdim=True).expand(-1, _BLOCK).reshape(-1)[: self._count]
        rounded = torch.finfo(original.dtype).eps  # when converted to the original's dtype
        least = (largest * 2.0**-18).clamp_min(_FLOAT8_LEAST)
        return _is_within(original, made, torch.maximum(original.abs() * (1 / 16 + rounded), least))


CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Bits, BFloat16, Float8)}
LOSSLESS = tuple(name for name, codec in CODECS.items() if codec.is_exact)
LOSSY = tuple(name for name in CODECS if name not in LOSSLESS)


def codec_for(tensor: torch.Tensor, names: Sequence[str], transport: Transport) -> type[Codec] | None:
    codecs = (CODECS[name] for name in names)
    return next((codec for codec in codecs if codec.takes(tensor) and codec.runs_on(transport)), None)


def _is_within(original: torch.Tensor, made: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """True if every value is within `bound`. Values that are not finite have to be equal."""
    is_same = (original == made) | (original.isnan() & made.isnan())
    return (is_same | ((original - made).abs() <= bound)).all()


# Packs boolean masks into bits, and unpacks them. A boolean is a byte of 0 or 1.
#
# The native core's kernels are registered as operations of torch. So tools that count operations count these too, with
# their traffic and their results, with and without data.

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
