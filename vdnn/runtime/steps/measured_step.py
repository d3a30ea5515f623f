"""The recording and the timeline of a finished step.

Both are computed when they are first read, because that may wait until the device has passed the end of the step. They
may be read on any thread; two at one time compute the same.
"""

from __future__ import annotations

import functools

from vdnn.runtime.steps.meter import Meter
from vdnn.runtime.steps.recorder import Recorder
from vdnn.runtime.storage.transport import Transport
from vdnn.step.recording import Recording
from vdnn.step.timeline import Timeline


class MeasuredStep:
    """A finished step of one device. It has no recording or no timeline if it had no recorder or no meter."""

    def __init__(self, recorder: Recorder | None, meter: Meter | None, transport: Transport) -> None:
        self._recorder = recorder
        self._meter = meter
        info = transport.device.info
        self._device = transport.torch_device.type, info.name, info.total_bytes

    @functools.cached_property
    def recording(self) -> Recording | None:
        return None if self._recorder is None else self._recorder.recording(*self._device)

    @functools.cached_property
    def timeline(self) -> Timeline | None:
        return None if self._meter is None else self._meter.timeline()
