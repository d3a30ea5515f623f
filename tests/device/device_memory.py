"""Fills and reads memory through a Device alone, so that the same test runs where pointers cannot be read."""

from __future__ import annotations

import ctypes
from functools import cache

from vdnn import _C

TO_HOST = _C.CopyDirection.DEVICE_TO_HOST
TO_DEVICE = _C.CopyDirection.HOST_TO_DEVICE


def fill_host(address: int, content: bytes) -> None:
    ctypes.memmove(address, content, len(content))


def read_host(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def upload(device: _C.Device, stream: _C.Stream, address: int, content: bytes) -> None:
    """Writes device memory and waits until the copy is complete."""
    staging = device.allocate_pinned(len(content))
    fill_host(staging, content)
    device.copy_async(address, staging, len(content), TO_DEVICE, stream)
    device.drain(stream)
    device.free_pinned(staging)


def download(device: _C.Device, stream: _C.Stream, address: int, size: int) -> bytes:
    """Reads device memory after all work on `stream` has run."""
    staging = device.allocate_pinned(size)
    device.copy_async(staging, address, size, TO_HOST, stream)
    device.drain(stream)
    content = read_host(staging, size)
    device.free_pinned(staging)
    return content


@cache
def pattern(size: int, seed: int = 1) -> bytes:
    """Bytes that differ from position to position and from seed to seed."""
    return bytes((index * 31 + seed * 97 + index // 251) % 256 for index in range(size))
