"""A device, a pool and a queue, with storages to move: the setup of the transfer tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.device.device_memory import download, pattern, upload
from vdnn import _C

KIB, MIB = 1 << 10, 1 << 20


class Storage:
    """Stands for a tensor: device memory, known content, and a flag that its last reference was dropped."""

    def __init__(self, rig: TransferRig, size: int, seed: int) -> None:
        self.rig = rig
        self.size = size
        self.content = pattern(size, seed)
        self.address = rig.device.allocate_device(size)

    def fill(self) -> None:
        upload(self.rig.device, self.rig.compute, self.address, self.content)


class Hold:
    """A keepalive that records when it was destroyed."""

    def __init__(self, gone: list[str], name: str) -> None:
        self.gone = gone
        self.name = name

    def __del__(self) -> None:
        self.gone.append(self.name)


@dataclass
class TransferRig:
    device: _C.Device
    options: dict[str, Any] = field(default_factory=dict)
    cap_bytes: int = 64 * MIB

    def __post_init__(self) -> None:
        self.compute = self.device.adopt_stream(0)
        self.pool = _C.PinnedPool(self.device, cap_bytes=self.cap_bytes)
        self.queue = _C.TransferQueue(self.device, self.pool, **self.options)
        self.gone: list[str] = []

    def storage(self, size: int, seed: int = 1) -> Storage:
        made = Storage(self, size, seed)
        made.fill()
        return made

    def hold(self, name: str) -> Hold:
        return Hold(self.gone, name)

    def offload(self, storage: Storage, name: str = "") -> _C.HostCopy:
        copy = self.queue.offload(
            storage.address, storage.size, self.compute, keepalive=self.hold(name) if name else None
        )
        assert copy is not None
        return copy

    def reload(self, copy: _C.HostCopy, name: str = "") -> tuple[_C.Reload, int]:
        target = self.device.allocate_device(copy.bytes)
        keepalive = self.hold(name) if name else None
        return self.queue.reload(copy, target, self.compute, keepalive=keepalive), target

    def read(self, address: int, size: int) -> bytes:
        return download(self.device, self.compute, address, size)

    def close(self) -> None:
        self.queue.close()
        self.pool.close()
