"""The same step without a compiler, planned by `auto` under the same budget, counted in the same way.

A compiled budget counts inputs, outputs and what is saved, but neither gradients nor what kernels need while they run.
So the recorded eager step is counted like that, too: the region's inputs and outputs, and what it has saved.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.harness.workloads import workload_named
from benchmarks.models.mixed_precision import mixed
from vdnn.errors import BudgetError
from vdnn.hardware import HardwareProfile
from vdnn.planning.costs import profile_costs
from vdnn.planning.planned_step import plan_step
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of
from vdnn.step.recording import Recording


class EagerStep:
    """One workload at its full size on one card, recorded in virtual time."""

    def __init__(self, network: str, profile: HardwareProfile) -> None:
        spec = workload_named(network)
        make = mixed(spec.make) if spec.autocast else spec.make
        self._recording = rehearse(subject_of(make, spec.batch), profile).recording
        self._costs = profile_costs(profile)

    @property
    def kept_ns(self) -> int:
        """The time with everything kept."""
        return self._recording.compute_ns

    def step_ns(self, ends_bytes: int, budget_bytes: int) -> int | None:
        """The time of the plan beside inputs and outputs of `ends_bytes`, or None if no plan meets the budget."""
        counted = counted_as_compiled(self._recording, ends_bytes)
        try:
            planned = plan_step(counted, self._costs, budget_bytes)
        except BudgetError:
            return None
        return planned.timeline.step_ns if planned.fits else None


def counted_as_compiled(recording: Recording, ends_bytes: int) -> Recording:
    """The recording with nothing allocated but `ends_bytes` and what is saved at each point."""
    changes = [0] * (len(recording.points) + 1)
    for lifetime in recording.lifetimes:
        changes[lifetime.saves[0]] += lifetime.nbytes
        changes[lifetime.end_point] -= lifetime.nbytes
    held, points = ends_bytes, []
    for point, change in zip(recording.points, changes, strict=False):
        before, held = held, held + change
        points.append(replace(point, allocated_bytes=held, peak_bytes=max(before, held)))
    return replace(recording, points=tuple(points), resident_bytes=ends_bytes)
