"""capuchin: offloads the storages with the most free time and reloads them in time (Peng et al., ASPLOS 2020).

The swapping of Capuchin, without its recomputation (see capuchin_full.py). Candidates are the gaps across the peak;
those with the most free time are offloaded first, until the step fits, also if no free time is left. The in-trigger of
a storage is the access that is just early enough for the reload to be complete at the next use, but not before there is
room. The step is then simulated, and late reloads get an earlier trigger, several times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vdnn.planning.gaps import Gap, gaps_of, planned_lifetimes
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.step_clock import StepClock
from vdnn.planning.policies.swap_schedule import release_when_copied, reload_within_room
from vdnn.planning.policies.under_budget import budget_to_meet, keep_everything
from vdnn.planning.published.peak_picking import free_ns, pick_at_peak
from vdnn.planning.search.step_model import make_step_model, tuples_by_gap
from vdnn.step.plan import Absence, Plan, make_plan


class Capuchin(PlanPolicy):
    """Without a budget nothing is offloaded. `feedback_steps`: how many simulations may move triggers.
    `feedback_part`: the part of its copy's time by which a trigger moves.

    Differences from the paper: it runs steps where this policy simulates them. Passive swapping, when an allocation
    fails, is left out: a plan does not need it. The default of `feedback_part` is from memory of the paper.
    """

    def __init__(self, *, feedback_steps: int = 40, feedback_part: float = 0.05) -> None:
        self._feedback_steps = feedback_steps
        self._feedback_part = feedback_part

    @property
    def name(self) -> str:
        return "capuchin"

    @property
    def source(self) -> str:
        return "Capuchin (Peng et al., ASPLOS 2020), its swapping"

    def plan(self, request: PlanRequest) -> Plan:
        budget_bytes = budget_to_meet(request)
        if budget_bytes is None:
            return keep_everything(request, self.name)
        recording = request.recording
        clock = StepClock(recording, request.costs)

        def most_free_time(candidates: Sequence[Gap], _: Sequence[int]) -> Iterator[Gap]:
            return iter(sorted(candidates, key=lambda gap: -free_ns(clock, gap)))

        gaps = gaps_of(recording)
        picked = set(pick_at_peak(recording, gaps, budget_bytes, most_free_time))
        chosen = [gap for gap in gaps if gap in picked]
        released = release_when_copied(recording, clock, chosen, budget_bytes)
        absences = self._with_feedback(request, clock, chosen, released, budget_bytes)
        return make_plan(recording, self.name, planned_lifetimes(recording, absences), budget_bytes)

    def _with_feedback(
        self,
        request: PlanRequest,
        clock: StepClock,
        gaps: Sequence[Gap],
        released: dict[Gap, int],
        budget_bytes: int,
    ) -> dict[Gap, Absence]:
        """The absences with the shortest step among all simulated ones."""
        model = make_step_model(request.recording, gaps, request.costs)
        lead_ns = {gap: float(clock.to_device_ns(gap.nbytes)) for gap in gaps}
        best: dict[Gap, Absence] = {}
        best_ns: int | None = None
        for _ in range(self._feedback_steps + 1):
            triggers = {
                gap: clock.last_point_by(int(clock.reached_ns[gap.use] - lead_ns[gap]))
                for gap in gaps
                if gap.use is not None
            }
            absences = reload_within_room(request.recording, released, triggers, budget_bytes)
            outcome = model.replay(tuples_by_gap(gaps, absences))
            if best_ns is None or outcome.step_ns < best_ns:
                best, best_ns = absences, outcome.step_ns
            late = [gaps[index] for index, is_reload, _, _ in outcome.stalls if is_reload and index >= 0]
            if not late:
                break
            for gap in late:
                lead_ns[gap] += self._feedback_part * clock.to_device_ns(gap.nbytes)
        return best
