"""One training step of VGG-16's convolutions in virtual time, driven by hand through a TransferQueue.

There is no model and no torch: each convolution advances the compute stream by its cost, its output map is offloaded as
soon as it exists, and reloaded ahead of its use. The time of the step, its stalls and the bytes of maps on the device
depend only on the calls, so they are the same on every machine. The backward pass of a convolution reads its input and
its output map.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.core.allocation_sequences import FLOAT32_BYTES
from benchmarks.core.vgg16 import CONVOLUTIONS, Convolution
from vdnn import _C
from vdnn.hardware import load_profile

# The card and the link of the vDNN paper, from the profile that virtual machines use.
PROFILE = load_profile("titan-x")
FLOP_PER_S = PROFILE.flop_per_s["float32"] * PROFILE.compute_efficiency


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of one step. `serial_ns` is the time of its compute and its copies one after the other."""

    way: str
    step_ns: int
    compute_ns: int
    serial_ns: int
    stall_ns: int
    offloaded_bytes: int
    reloaded_bytes: int
    peak_bytes: int
    requested_peak_bytes: int
    pinned_peak_bytes: int


class HeldMaps:
    """The bytes of feature maps on the device, as its allocator would count them."""

    def __init__(self) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0

    def take(self, taken_bytes: int) -> None:
        self.now_bytes += taken_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def give(self, given_bytes: int) -> None:
        self.now_bytes -= given_bytes


class VirtualMachine:
    """A device that only keeps time, its pool and its queue. Owns them until close()."""

    def __init__(self, batch: int, window_bytes: int) -> None:
        self.batch = batch
        link = _C.LinkModel(
            to_host_bytes_per_s=PROFILE.to_host_bytes_per_s,
            to_device_bytes_per_s=PROFILE.to_device_bytes_per_s,
            duplex_bytes_per_s=PROFILE.duplex_bytes_per_s,
            latency_ns=PROFILE.link_latency_ns,
        )
        self.link = link
        self.device = _C.SimDevice(moves_bytes=False, link=link)
        self.compute = self.device.adopt_stream()
        self.pool = _C.PinnedPool(self.device, cap_bytes=2**40)
        self.queue = _C.TransferQueue(self.device, self.pool, offload_window_bytes=window_bytes)
        self.memory = self.device.allocate_device(max(map(self.map_bytes, CONVOLUTIONS)))
        self.held = HeldMaps()

    def close(self) -> None:
        self.queue.close()
        self.pool.close()
        self.device.close()

    def map_bytes(self, convolution: Convolution) -> int:
        return self.batch * convolution.output_elements * FLOAT32_BYTES

    def forward(self, convolution: Convolution) -> None:
        self.held.take(self.map_bytes(convolution))
        self.device.advance(self.compute, convolution.forward_ns(self.batch, FLOP_PER_S))

    def backward(self, convolution: Convolution) -> None:
        self.device.advance(self.compute, convolution.backward_ns(self.batch, FLOP_PER_S))
        self.held.give(self.map_bytes(convolution))

    def offload(self, convolution: Convolution) -> _C.HostCopy:
        size = self.map_bytes(convolution)
        # All maps share one address, because the device never reads what it copies.
        copy = self.queue.offload(self.memory, size, self.compute, keepalive=convolution)
        self._count_released()
        assert copy is not None  # the queue's default, Growth.NOW, pins memory or raises
        return copy

    def release(self, copy: _C.HostCopy) -> None:
        self.queue.release(copy)
        self._count_released()

    def reload(self, copy: _C.HostCopy) -> _C.Reload:
        self.held.take(copy.bytes)
        return self.queue.reload(copy, self.memory, self.compute)

    def _count_released(self) -> None:
        for convolution in self.queue.take_released():
            assert isinstance(convolution, Convolution)
            self.held.give(self.map_bytes(convolution))

    def figures(self, way: str) -> StepFigures:
        stats, compute_ns = self.queue.stats, self.computing_ns()
        copies = stats.offloads + stats.reloads
        out_ns = stats.offloaded_bytes / PROFILE.to_host_bytes_per_s * 1e9
        back_ns = stats.reloaded_bytes / PROFILE.to_device_bytes_per_s * 1e9
        return StepFigures(
            way=way,
            step_ns=self.device.now_ns(self.compute),
            compute_ns=compute_ns,
            serial_ns=compute_ns + round(out_ns + back_ns) + copies * self.link.latency_ns,
            stall_ns=self.device.stall_ns(self.compute),
            offloaded_bytes=stats.offloaded_bytes,
            reloaded_bytes=stats.reloaded_bytes,
            peak_bytes=self.held.peak_bytes,
            requested_peak_bytes=self.pool.stats.live_peak_bytes,
            pinned_peak_bytes=self.pool.stats.pinned_peak_bytes,
        )

    def computing_ns(self) -> int:
        layers = CONVOLUTIONS
        forward = sum(layer.forward_ns(self.batch, FLOP_PER_S) for layer in layers)
        return forward + sum(layer.backward_ns(self.batch, FLOP_PER_S) for layer in layers)


def keep_everything(batch: int) -> StepFigures:
    machine = VirtualMachine(batch, window_bytes=2**40)
    try:
        for convolution in CONVOLUTIONS:
            machine.forward(convolution)
        for convolution in reversed(CONVOLUTIONS):
            machine.backward(convolution)
        return machine.figures("keep")
    finally:
        machine.close()


def offload_everything(batch: int, *, window_bytes: int, lookahead: int, way: str) -> StepFigures:
    """Release maps when the window of offloads in flight is full, and all of them at the end of the forward pass."""
    machine = VirtualMachine(batch, window_bytes)
    try:
        copies = []
        for convolution in CONVOLUTIONS:
            machine.forward(convolution)
            copies.append(machine.offload(convolution))
        for copy in copies:
            machine.release(copy)
        _run_backward(machine, copies, lookahead)
        return machine.figures(way)
    finally:
        machine.close()


def _run_backward(machine: VirtualMachine, copies: list[_C.HostCopy], lookahead: int) -> None:
    """Run the backward pass. While a convolution computes, the maps of `lookahead` more are being reloaded."""
    reloads: dict[int, _C.Reload] = {}
    for index in reversed(range(len(CONVOLUTIONS))):
        for wanted in range(index, max(index - lookahead - 2, -1), -1):
            if wanted not in reloads:
                reloads[wanted] = machine.reload(copies[wanted])
        for needed in range(index, max(index - 2, -1), -1):
            machine.queue.wait(reloads[needed], machine.compute)
        machine.backward(CONVOLUTIONS[index])


def measure_steps(batch: int) -> list[StepFigures]:
    return [
        keep_everything(batch),
        offload_everything(batch, window_bytes=1, lookahead=1, way="offload, one map out, 1 ahead"),
        offload_everything(batch, window_bytes=2**30, lookahead=1, way="offload, 1 GiB out, 1 ahead"),
        offload_everything(batch, window_bytes=2**31, lookahead=2, way="offload, 2 GiB out, 2 ahead"),
    ]
