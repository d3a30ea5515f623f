"""What may be left of a storage in its place, and how it is made of that again: masks as bits, floats with fewer bits.

Lossless ones are there for whoever plans; lossy ones only for who names them, each with its bound. A codec is a recipe
that reads what it left, and nothing else. That is managed like any storage, so it may leave the device too. See
docs/recompute.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from vdnn.runtime.recompute.bit_mask import pack_bits, unpack_bits
from vdnn.runtime.storage.counters import Counters
from vdnn.runtime.storage.geometry import Geometry
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
    """One storage, encoded. `tensor` fills it; that runs on the current stream."""

    name: ClassVar[str]
    is_exact: ClassVar[bool]
    is_exact_in_bytes: ClassVar[bool] = False  # it knows the values of one dtype

    def __init__(self, tensor: torch.Tensor, transport: Transport, counters: Counters) -> None:
        self._geometry: Geometry = (tensor.dtype, tensor.size(), tensor.stride())
        self._count = tensor.numel()
        self._transport = transport
        with torch.no_grad():
            kept = self._encoded(tensor)
        storage, witness = kept.untyped_storage(), counter_of(kept)
        self.managed = managed = ManagedStorage(transport, counters, storage, 0, storage.nbytes(), witness)
        self.operands = (PackedView(managed, kept, witness),)
        managed.geometry = self.operands[0].geometry
        managed.is_dense = self.operands[0].is_dense(kept)
        managed.views = 0  # who gives something up for this counts the one there is
        managed.keeps_reloaded = True  # for another backward

    @staticmethod
    @abstractmethod
    def takes(tensor: torch.Tensor) -> bool: ...

    @staticmethod
    def admits(values: torch.Tensor) -> bool:
        """Whether it can hold these values; asked of each storage, so it must not make the host wait for a GPU."""
        return True

    @abstractmethod
    def _encoded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Alone in its storage."""

    @abstractmethod
    def _decoded(self, kept: torch.Tensor) -> torch.Tensor:
        """A tensor whose storage is the one that was encoded."""

    @abstractmethod
    def is_close(self, original: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Of flat tensors, whether every value is within the bound."""

    @property
    def kept_bytes(self) -> int:
        return self.managed.nbytes

    @property
    def signature(self) -> tuple[str, Geometry]:
        return self.name, self._geometry

    def recompute(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        kept = unpack(self.operands[0])
        with torch.no_grad():
            return self._decoded(kept)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """All values of its storage, in their order there."""
        return tensor.as_strided((self._count,), (1,), 0)


class Bits(Codec):
    """Booleans, eight in a byte. Lossless for what torch's operations make: a byte of 0 or 1. Integers that were viewed
    as booleans may have others, which is seen on the CPU; on a GPU a recheck finds it."""

    name = "bits"
    is_exact = True

    @staticmethod
    def takes(tensor: torch.Tensor) -> bool:
        return tensor.dtype is torch.bool and tensor.device.type in ("cpu", "cuda")

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
    """Floats of 32 or 64 bits as bfloat16. Each comes back within a 256th of itself, or within 2^-134."""

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
    """Floats as eight bits (e4m3), with a scale for every 128. Each comes back within a sixteenth of itself, or within
    a 2^-18th of the largest of its 128, or within 2^-135."""

    name = "fp8"
    is_exact = False

    @staticmethod
    def takes(tensor: torch.Tensor) -> bool:
        return tensor.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)

    def _encoded(self, tensor: torch.Tensor) -> torch.Tensor:
        values = self._in_blocks(self.flat(tensor)).to(torch.float32)
        kept = torch.empty(len(values) * (_SCALE_BYTES + _BLOCK), dtype=torch.uint8, device=tensor.device)
        scales, codes = self._parts(kept)
        scales.copy_(values.abs().amax(1, keepdim=True) / _FLOAT8_LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        codes.copy_(values / scales)
        return kept

    def _parts(self, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and codes: one of each for a block, in one storage."""
        split = len(kept) // (_SCALE_BYTES + _BLOCK) * _SCALE_BYTES
        scales, codes = kept[:split].view(torch.float32), kept[split:].view(torch.float8_e4m3fn)
        return scales.view(-1, 1), codes.view(-1, _BLOCK)

    def _in_blocks(self, values: torch.Tensor) -> torch.Tensor:
        missing = -self._count % _BLOCK
        return torch.nn.functional.pad(values, (0, missing)).view(-1, _BLOCK)

    def _decoded(self, kept: torch.Tensor) -> torch.Tensor:
        scales, codes = self._parts(kept)
        values = (codes.to(torch.float32) * scales).to(self._geometry[0])
        return values.view(-1)[: self._count].clone() if self._count % _BLOCK else values

    def is_close(self, original: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        largest = self._in_blocks(original).abs().amax(1, keepdim=True).expand(-1, _BLOCK).reshape(-1)[: self._count]
        rounded = torch.finfo(original.dtype).eps  # of the original's own type
        least = (largest * 2.0**-18).clamp_min(_FLOAT8_LEAST)
        return _is_within(original, made, torch.maximum(original.abs() * (1 / 16 + rounded), least))


CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Bits, BFloat16, Float8)}
LOSSLESS = tuple(name for name, codec in CODECS.items() if codec.is_exact)
LOSSY = tuple(name for name in CODECS if name not in LOSSLESS)


def codec_for(tensor: torch.Tensor, names: Sequence[str]) -> type[Codec] | None:
    return next((CODECS[name] for name in names if CODECS[name].takes(tensor)), None)


def _is_within(original: torch.Tensor, made: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """What is not finite has to come back as it was."""
    is_same = (original == made) | (original.isnan() & made.isnan())
    return (is_same | ((original - made).abs() <= bound)).all()
