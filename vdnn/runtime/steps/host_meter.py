"""Measures how long the host takes to issue settled steps, on devices that compute behind it, so that plans know their
host.

The gate measures the first settled steps of each plan: the time of the program between its hooks, and that of hooks by
what they do (csrc/hooks/host_times.h). Settled steps are measured, because hooks of recorded ones take many times as
long.

[Note: A host far ahead] A host that is ahead of its device waits in the driver as soon as the device's queue is full,
and from then on a launch seems to take as long as a kernel. So the device finishes its work before a step is measured.
If the queue fills up even then, the time that was measured still is shorter than the step of the device, and so it is
not taken for a step that the host bounds.

[Note: Whole steps] A program that waits for its device inside of a step seems to be a slow host, and a plan for such a
host may be slower than the one before it. What the gate measures does not tell the two apart. So the whole time from
the beginning of a measured step to that of the next one is measured too, and a plan for the host has to be as fast as
the one that it replaced.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from vdnn import _C
from vdnn.hardware import HostFigures, load_profile
from vdnn.runtime.steps.executor import Executor
from vdnn.runtime.storage.transport import Transport

# The steps of each plan that are measured. The shortest counts: others may have been interrupted.
_MEASURED_STEPS = 3
# What copies and recomputes cost this host is assumed as long as no measured step has had any.
_ASSUMED_HOST = "h200"


class HostTimes(NamedTuple):
    """The time of the host in one settled step, in nanoseconds: the program's own; that of hooks that neither move nor
    recompute anything; that of hooks that recompute something; and that of all other hooks, which make `moves`
    copies."""

    outside_ns: int
    kept_ns: int
    moving_ns: int
    moves: int
    recomputing_ns: int
    recomputes: int

    @property
    def issue_ns(self) -> int:
        """The time in which the host issues the step, apart from what it moves and recomputes."""
        return self.outside_ns + self.kept_ns

    @property
    def total_ns(self) -> int:
        return self.issue_ns + self.moving_ns + self.recomputing_ns


class HostOfPlan(NamedTuple):
    """The host in steps that follow one plan. It issues such a step in `issue_ns`, apart from copies and recomputes,
    which cost it what `figures` say: a recompute with its operations. `step_ns` is the shortest whole step of training,
    or None if no two steps in a row were measured: see [Note: Whole steps]."""

    issue_ns: int
    figures: HostFigures
    step_ns: int | None = None


class HostMeter:
    """The measured steps of one session. `measured` is called when enough steps that followed one plan were
    measured."""

    def __init__(self, measured: Callable[[Executor, HostOfPlan], None]) -> None:
        self._measured = measured
        self._figures: HostFigures | None = None  # None: assumed when they are first asked for
        self._times: weakref.WeakKeyDictionary[Executor, list[HostTimes]] = weakref.WeakKeyDictionary()
        self._running: Executor | None = None  # the plan of the step that is being measured
        # The beginning of the last measured step, its plan, and the steps that have ended since.
        self._begin_ns, self._ended = 0, 0
        self._begun: weakref.ref[Executor] | None = None
        self._step_ns: weakref.WeakKeyDictionary[Executor, int] = weakref.WeakKeyDictionary()

    def begin(self, gate: _C.Gate, executor: Executor, transport: Transport) -> None:
        """Called at the first save of a settled step."""
        if len(self._times.setdefault(executor, [])) < _MEASURED_STEPS:
            transport.device.drain(transport.current_stream())  # see [Note: A host far ahead]
            self._note_beginning(executor)
            gate.measure_host()
            self._running = executor

    def ended(self, gate: _C.Gate, *, is_whole: bool) -> None:
        """Called when a step has ended. `is_whole`: the gate has served all of it."""
        executor, self._running = self._running, None
        self._ended += 1
        if executor is None:
            return
        times = HostTimes(*gate.host_times())
        known = self._times.get(executor)
        if is_whole and known is not None:
            known.append(times)
            if len(known) == _MEASURED_STEPS:
                host = self._issue(min(known, key=lambda one: one.total_ns))
                self._measured(executor, host._replace(step_ns=self._step_ns.get(executor)))

    def _note_beginning(self, executor: Executor) -> None:
        """The device has finished all earlier work."""
        now_ns = time.perf_counter_ns()
        if self._ended == 1 and self._begun is not None and self._begun() is executor:
            step_ns = now_ns - self._begin_ns
            self._step_ns[executor] = min(step_ns, self._step_ns.get(executor, step_ns))
        self._begin_ns, self._begun, self._ended = now_ns, weakref.ref(executor), 0

    def _issue(self, times: HostTimes) -> HostOfPlan:
        """If the steps of this plan move nothing, or recompute nothing, the last figures of another plan hold on."""
        figures = self._figures or _assumed()
        if times.moves:
            figures = replace(figures, copy_ns=times.moving_ns // times.moves)
        if times.recomputes:
            figures = replace(figures, recompute_ns=times.recomputing_ns // times.recomputes)
        self._figures = figures
        return HostOfPlan(times.issue_ns, figures)


def _assumed() -> HostFigures:
    figures = HostFigures.of(load_profile(_ASSUMED_HOST))
    if figures is None:
        raise RuntimeError(f"expected figures of a host in the profile {_ASSUMED_HOST}, got none")
    return replace(figures, recompute_ns=figures.recompute_ns + figures.operation_ns + figures.launch_ns)
