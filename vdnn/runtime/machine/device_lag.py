"""Keeps a GPU behind the host while a step is recorded, so that recorded times are those of the GPU.

The hooks of a recorded step cost the host more than most operations cost the GPU. Without a lag the GPU waits for the
host in every interval, and the times between marks are the host's: on an H200 a step of 60 to 68 ms was recorded with
99 to 140 ms, and plans hid copies behind compute that is not there. So a kernel that waits is put between two
intervals. It runs while the host issues the next one, and costs hardly any time that the host does not need anyway.

[Note: Time that the host waits] A trial of a recipe waits for the device, and so for the lag itself. If that time
counted as the host's, the next lag would be twice as long, and the one behind it four times.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from vdnn import _C

# So many hooks behind the host is enough: the driver's queue is short, and each wait costs time.
_HOOKS_BEHIND = 2
# A hook and the operations behind it may take longer than those before them.
_MARGIN = 2.0
_SHORTEST_NS, _LONGEST_NS = 50_000, 20_000_000
# Of a GPU whose clock torch does not tell, a low one: a longer wait costs time, a shorter one accuracy.
_CLOCK_KHZ = 1_500_000

# Spins for a number of cycles on the current stream; absent if torch has no CUDA.
_spin: Callable[[int], None] | None = getattr(torch._C, "_cuda_sleep", None)


class DeviceLag:
    """The lag of one device behind the host."""

    def __init__(self, torch_device: torch.device, device: _C.Device) -> None:
        self._torch_device = torch_device
        self._device = device
        self._reached: deque[_C.Event] = deque(maxlen=_HOOKS_BEHIND)
        self._last_ns = 0
        self._waited_ns = 0  # since then
        self._cycles_per_ns = 0.0  # 0: not asked yet

    def extend(self, stream: _C.Stream) -> bool:
        """Called between two intervals, on the stream that computes: lets it wait for about as long as the host needs
        until the next call, unless it is far enough behind. True if it will wait."""
        now_ns = time.perf_counter_ns()
        took_ns, self._last_ns, self._waited_ns = now_ns - self._last_ns - self._waited_ns, now_ns, 0
        is_behind = len(self._reached) == _HOOKS_BEHIND and not self._device.query(self._reached[0])
        self._reached.append(self._device.record(stream))
        if _spin is None or is_behind:
            return False
        wait_ns = min(max(_MARGIN * took_ns, _SHORTEST_NS), _LONGEST_NS)
        with torch.cuda.device(self._torch_device):
            _spin(round(wait_ns * self._clock()))
        return True

    @contextlib.contextmanager
    def host_waits(self) -> Iterator[None]:
        """A context in which the host waits for the device. See [Note: Time that the host waits]."""
        begin_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._waited_ns += time.perf_counter_ns() - begin_ns

    def _clock(self) -> float:
        """Cycles in a nanosecond."""
        if not self._cycles_per_ns:
            properties = torch.cuda.get_device_properties(self._torch_device)
            self._cycles_per_ns = getattr(properties, "clock_rate", _CLOCK_KHZ) / 1e6
        return self._cycles_per_ns
