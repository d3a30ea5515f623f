"""Predicts the Timeline of a plan. The native core replays the step; csrc/planning/step_timeline.h explains how.

A plan for another step is refused.
"""

from __future__ import annotations

import functools

from vdnn import _C
from vdnn.errors import InvalidArgumentError
from vdnn.planning.costs import LinkCosts
from vdnn.planning.recomputing import recording_under
from vdnn.planning.recorded_step import make_link_model, recorded_step
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording
from vdnn.step.timeline import Copy, Mark, Timeline, Track


class SimulatedStep:
    """A step under a plan, as predicted. Its timeline is made when somebody asks for it: most plans are compared by a
    few figures and dropped."""

    def __init__(self, native: _C.StepTimeline, clock: str) -> None:
        self._native = native
        self._clock = clock
        self.step_ns = native.step_ns
        self.host_ns = native.host_ns
        self.peak_bytes = native.peak_bytes

    @property
    def host_stall_ns(self) -> int:
        return self._native.host_stall_ns

    @functools.cached_property
    def timeline(self) -> Timeline:
        marks = tuple([Mark(*mark) for mark in self._native.marks])
        copies = tuple(
            [Copy(Track.TO_HOST if is_out else Track.TO_DEVICE, *copy) for is_out, *copy in self._native.copies]
        )
        return Timeline("predicted", self._clock, self.step_ns, marks, copies, self.host_ns)


def simulate(recording: Recording, plan: Plan, costs: LinkCosts) -> Timeline:
    """The predicted timeline. `recording` is of the step without a plan. Raises VdnnError if the plan is for another
    step."""
    return simulate_followed(recording_under(recording, plan.lifetimes), plan, costs).timeline


def simulate_followed(followed: Recording, plan: Plan, costs: LinkCosts) -> SimulatedStep:
    """The same for the step with the plan's recomputes."""
    require_plan_of(followed, plan)
    native = recorded_step(followed).simulate(plan.lifetimes, make_link_model(costs), costs.issue_ns)
    return SimulatedStep(native, followed.clock)


def require_plan_of(recording: Recording, plan: Plan) -> None:
    points = [(point.kind, point.lifetime) for point in recording.points]
    sizes = [lifetime.nbytes for lifetime in recording.lifetimes]
    if points != [(point.kind, point.lifetime) for point in plan.points] or sizes != [
        planned.nbytes for planned in plan.lifetimes
    ]:
        raise InvalidArgumentError(
            argument="plan",
            expected=f"a plan for this recording of {len(points)} points and {len(sizes)} storages",
            got=f"one that {plan.policy!r} made for another step, of {len(plan.points)} points and "
            f"{len(plan.lifetimes)} storages. Plan the recorded step again",
        )
