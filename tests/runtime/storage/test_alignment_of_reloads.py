"""A reload has the alignment of the original: to 64 bytes on the CPU, and to 512 on CUDA, as its allocators align."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vdnn import _C
from vdnn.runtime.storage import reloaded
from vdnn.runtime.storage.reloaded import Reloaded
from vdnn.runtime.storage.transport import alignment_on

SIZES = {"cpu": 64, "cuda": 512}
NBYTES = 1024


def allocation_at(offset: int, nbytes: int) -> torch.Tensor:
    """Bytes that begin `offset` bytes after a multiple of 512."""
    buffer = (ctypes.c_char * (nbytes + 1024))()
    begin = -ctypes.addressof(buffer) % 512 + offset
    return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=begin)


def reload_of(address: int, device: str, allocated_at: int, monkeypatch: pytest.MonkeyPatch) -> Reloaded:
    """A reload of bytes that were at `address`, into allocations of a stand-in for torch's allocator."""

    def empty(nbytes: int, **_: Any) -> torch.Tensor:
        return allocation_at(allocated_at, nbytes)

    def empty_strided(size: tuple[int, ...], stride: tuple[int, ...], **_: Any) -> torch.Tensor:
        return empty(NBYTES)

    monkeypatch.setattr(reloaded, "torch", SimpleNamespace(empty=empty, empty_strided=empty_strided, uint8=torch.uint8))
    transport: Any = SimpleNamespace(
        torch_device=torch.device(device),
        alignment=alignment_on(torch.device(device)),
        fake=False,
        queue=SimpleNamespace(reload=lambda *_: None),
        reload_in_flight_bytes=0,
        address_of=torch.UntypedStorage.data_ptr,
    )
    geometry = (torch.uint8, (NBYTES,), (1,))
    facts: Any = SimpleNamespace(address=address, nbytes=NBYTES, is_dense=True, geometry=geometry)
    copy: Any = None
    return Reloaded(transport, copy, facts, _C.SimDevice().adopt_stream(), 1)


@pytest.mark.parametrize("allocated_at", [0, 64, 256])
@pytest.mark.parametrize("address", [0, 4, 64, 128, 256, 320])
@pytest.mark.parametrize("device", SIZES)
def test_a_reload_is_aligned_as_the_original(
    device: str, address: int, allocated_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reload_of(4096 + address, device, allocated_at, monkeypatch)
    assert made.address % SIZES[device] == address % SIZES[device]
    assert made.address == made.tensor.untyped_storage().data_ptr() + made.begin
    assert made.begin + NBYTES <= made.tensor.untyped_storage().nbytes()
