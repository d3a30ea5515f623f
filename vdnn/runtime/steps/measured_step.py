"""The recording and the timeline of a finished step.

Both are computed when they are first read, because that may wait until the device has passed the end of the step. They
may be read on any thread; two at one time compute the same.
"""

from __future__ import annotations

import functools

from vdnn.runtime.machine.gauges import Mark, Peaks
from vdnn.runtime.steps.meter import Meter
from vdnn.runtime.steps.recorder import Recorder
from vdnn.runtime.steps.watched_step import WatchedStep
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

    def add_recomputes(self, recording: Recording) -> None:
        """`recording` is this step's, with recomputes that are known from other steps: one that followed a plan has
        looked for none."""
        self.recording = recording

    @functools.cached_property
    def timeline(self) -> Timeline | None:
        return None if self._meter is None else self._meter.timeline()


class MeasuredSteps:
    """The last recorded and the last measured step of one session."""

    def __init__(self) -> None:
        self.last_recorded: MeasuredStep | None = None
        self._last_measured: MeasuredStep | None = None

    @property
    def recording(self) -> Recording | None:
        return None if self.last_recorded is None else self.last_recorded.recording

    @property
    def timeline(self) -> Timeline | None:
        return None if self._last_measured is None else self._last_measured.timeline

    def finish(self, step: WatchedStep, transport: Transport, ends: tuple[Mark, Mark], peaks: Peaks) -> MeasuredStep:
        """Ends a step. Its last computation is over at the first of `ends`; copies of freed graphs have released their
        memory at the second."""
        measured = MeasuredStep(step.recorder, step.meter, transport)
        if step.meter is not None:
            step.meter.finish(*ends, peaks.peak_bytes)
            self._last_measured = measured
        if step.recorder is not None:
            step.recorder.finish(ends[0], peaks.with_absent_bytes, has_data=not transport.fake)
            self.last_recorded = measured
        return measured
