"""Plans recorded steps for the user's budget, on the device that they ran on. Makes the plans of a plan book between
two hooks: from recorded steps, from predicted ones, and again after a step that exceeded its budget.

Without a budget a plan may use the memory of the device, less a reserve. A budget that cannot be met is refused, and so
is a plan that does not fit.

The training waits while a plan is made, quickly. A Python thread beside it would take Python's lock from every
operation that it issues: on an H200 a step took 3 to 13 times as long while a plan was made, and plans came ten steps
late (decision 75). A deep search, which is native, runs beside the training (better_plans.py).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from vdnn import _C
from vdnn.bytesize import format_bytes
from vdnn.errors import VdnnError
from vdnn.hardware import HardwareProfile
from vdnn.planning.budget import Budget, bytes_without_budget
from vdnn.planning.costs import LinkCosts, measured_costs, profile_costs
from vdnn.planning.host_costs import with_host
from vdnn.planning.least_memory import as_if_feasible, least_bytes, require_feasible_budget
from vdnn.planning.planned_step import PlannedStep, plan_step
from vdnn.planning.policies import PlanPolicy
from vdnn.planning.recorded_step import recorded_step
from vdnn.planning.simulate import simulate, simulate_followed
from vdnn.runtime.steps.better_plans import BetterPlans
from vdnn.runtime.steps.executor import Executor
from vdnn.runtime.steps.host_meter import HostOfPlan
from vdnn.runtime.steps.plan_table import PlanOrigin, SizedPlan, StepTally
from vdnn.runtime.steps.size_model import SizePrediction
from vdnn.runtime.torch_internals.spans import span
from vdnn.step.made_steps import covering, first_point, order_of, with_more_resident
from vdnn.step.plan import Action, Plan
from vdnn.step.recording import Recording
from vdnn.step.timeline import Timeline
from vdnn.user_warnings import warn

# The share of the budget that plans leave free. A step that grows by a few bytes (a metric that is kept) still fits.
SLACK = 0.01
_SLOWEST = 64  # the last factor by which a plan takes the link as slower, to offload less
# The rates that are assumed if no copy was measured: those of large copies of pinned memory over PCIe gen 4.
_ASSUMED_LINK = LinkCosts(24e9, 24e9, 42e9, 10_000)


@dataclass(frozen=True, slots=True)
class BudgetPlanner:
    """Plans steps under one budget. `profile` describes a machine that is not present. A `budget` of None stands for
    the memory of the device, less the reserve. `unrecorded_bytes` is memory that steps may take beyond their
    recordings, such as for parameters that are copied ahead of their uses once the order of these is known.
    `state_bytes` is what training state takes of the host's memory, and `room_beside_state(bytes)` how much blocks of
    `bytes` can take beside it: less than the rest of the limit where state has left pieces only."""

    policy: PlanPolicy
    budget: Budget | None
    host_bytes: int | None
    profile: HardwareProfile | None
    unrecorded_bytes: int = 0
    state_bytes: int = 0
    room_beside_state: Callable[[int], int] | None = None

    def planned(
        self,
        recording: Recording,
        timeline: Timeline | None,
        tightened_bytes: int = 0,
        *,
        where_possible: bool = False,
        known: Plan | None = None,
        host: HostOfPlan | None = None,
    ) -> PlannedStep:
        """Make a plan for `tightened_bytes` less than the budget. The link's rates are measured from the copies in
        `timeline`, the recorded step's. Raises BudgetError, or VdnnError if the policy has no plan that fits. With
        `where_possible` it meets the budget in all intervals of the step in which a plan can. `known`: the plan of
        nearly the same step, from which the search begins. `host`: plans for it, if it was measured."""
        recording, costs = self.on_host(recording, timeline, host)
        budget_bytes = self.budget_bytes(recording)
        if where_possible:
            recording = as_if_feasible(recording, budget_bytes)
        least = least_bytes(recording)
        if least > budget_bytes:
            require_feasible_budget(recording, budget_bytes)
        target_bytes = max(least, self._most_bytes(recording, tightened_bytes))
        # For the budget "min" the plan with the smallest peak is accepted.
        must_fit = not (self.policy.name == "auto" and self.wants_the_least)
        policy = self.policy if known is None else self.policy.near(known)
        planned = plan_step(recording, costs, target_bytes, policy, must_fit=must_fit)
        slower = 1
        while slower < _SLOWEST and self.lacks_host_memory(planned.plan):
            # On a slower link the search recomputes more and offloads less.
            slower *= 2
            found = plan_step(recording, costs.slowed(slower), target_bytes, policy, must_fit=must_fit)
            if found.plan.offloaded_bytes < planned.plan.offloaded_bytes:
                planned = replace(found, simulated=simulate_followed(found.followed, found.plan, costs))
        self.require_host(planned.plan, target_bytes)
        return planned

    def is_feasible(self, recording: Recording) -> bool:
        return least_bytes(recording) <= self.budget_bytes(recording)

    def target_bytes(self, recording: Recording, tightened_bytes: int = 0) -> int:
        """The peak that the plan may reach: the budget less the slack, unless that is too little. A step that fits
        the whole budget moves nothing."""
        return max(least_bytes(recording), self._most_bytes(recording, tightened_bytes))

    def _most_bytes(self, recording: Recording, tightened_bytes: int) -> int:
        """The same, also where it is too little."""
        budget_bytes = self.budget_bytes(recording)
        if self.budget is not None and recording.peak_bytes > budget_bytes:  # a reserve is larger than the slack
            budget_bytes = int(budget_bytes * (1 - SLACK))
        return budget_bytes - tightened_bytes - self.unrecorded_bytes

    def budget_bytes(self, recording: Recording) -> int:
        return self.budget_of(recorded_step(recording), recording.device_bytes)

    def budget_of(self, step: _C.RecordedStep, device_bytes: int) -> int:
        fixed_bytes = self.fixed_bytes(device_bytes)
        return min(max(step.least_peaks), device_bytes) if fixed_bytes is None else fixed_bytes

    def fixed_bytes(self, device_bytes: int) -> int | None:
        """The budget of every step on a device of `device_bytes`; None for "min", which depends on the step."""
        if self.budget is None:
            return bytes_without_budget(device_bytes)
        return self.budget.fixed_bytes(device_bytes)

    @property
    def wants_the_least(self) -> bool:
        """True for the budget "min"."""
        return self.budget is not None and self.budget.nbytes is None and self.budget.share is None

    def costs(self, timeline: Timeline | None) -> LinkCosts:
        if self.profile is not None:
            return profile_costs(self.profile)
        return _ASSUMED_LINK if timeline is None else measured_costs(timeline, _ASSUMED_LINK)

    def on_host(
        self, recording: Recording, timeline: Timeline | None, host: HostOfPlan | None
    ) -> tuple[Recording, LinkCosts]:
        """The step and the costs of the link, on this host if it was measured."""
        costs = self.costs(timeline)
        if host is None:
            return recording, costs
        return with_host(recording, host.issue_ns, host.figures), replace(costs, issue_ns=host.figures.copy_ns)

    def lacks_host_memory(self, plan: Plan) -> bool:
        """True if the host may not hold what the plan offloads, or not in blocks as large as the largest of it."""
        room_bytes = self.host_room_bytes
        if room_bytes is None:
            return False
        if self.room_beside_state is not None:
            offloaded = [one.nbytes for one in plan.lifetimes if one.action is Action.OFFLOAD]
            room_bytes = min(room_bytes, self.room_beside_state(max(offloaded, default=0)))
        return plan.offloaded_bytes > room_bytes

    def require_host(self, plan: Plan, budget_bytes: int | None = None) -> None:
        """Raises VdnnError if a plan for this budget offloads more than the host may hold."""
        room_bytes = self.host_room_bytes
        if room_bytes is not None and plan.offloaded_bytes > room_bytes:
            budget = "its budget" if budget_bytes is None else format_bytes(budget_bytes)
            state = f" beside {format_bytes(self.state_bytes)} of training state" if self.state_bytes else ""
            raise VdnnError(
                f"host_budget {format_bytes(self.host_bytes or 0)} is too small: to stay under {budget} on the device "
                f"{format_bytes(plan.offloaded_bytes)} have to be offloaded{state}."
            )

    @property
    def host_room_bytes(self) -> int | None:
        """How much a step may offload; None if there is no limit."""
        return None if self.host_bytes is None else max(0, self.host_bytes - self.state_bytes)


logger = logging.getLogger("vdnn")

_MOST_TIGHTENINGS = 3
_MOST_PLANS_FOR_HOST = 3
# The share of the budget that the plan of a guessed step leaves free.
_FREE_OF_GUESS = 0.05
# The same, of a step whose storages grow and shrink while its size stays.
_FREE_OF_UNBALANCED = 0.07
# A plan for a step that has one already is made while all plans together took no more than this share of the time.
_SHARE_OF_TIME = 0.1
# A plan for a slow host replaces another one if the step is shorter by more than this share: what it is made of was
# measured in few steps.
_WORTH_FOR_HOST = 0.02
# It has to prove itself: it goes again if whole steps take longer by more than this share.
_SLOWER_FOR_HOST = 0.02


def searches_beside(planner: BudgetPlanner) -> bool:
    """True if a deep search runs beside the training. In virtual time the steps that follow its plan would depend on
    how fast the search is."""
    return planner.profile is None


class PlanMaker:
    """Makes sized plans, and plans them again. `latest` is the executor of the latest plan."""

    def __init__(self, planner: BudgetPlanner, tally: StepTally) -> None:
        self.planner = planner
        self.latest: Executor | None = None
        self.better = BetterPlans(planner.policy, planner.costs) if searches_beside(planner) else None
        self._tally = tally
        self._began_s = time.monotonic()
        self._planning_s = 0.0

    @property
    def may_improve(self) -> bool:
        """True if there is time to plan a step that the plan of a larger step already serves. This bounds the time for
        planning where lengths change in every step. Planning takes no virtual time."""
        if self.planner.profile is not None:
            return True
        return self._planning_s <= _SHARE_OF_TIME * (time.monotonic() - self._began_s)

    def take_over(self) -> None:
        """Called between two steps. A sized plan takes over the better plan that the search beside the training
        found."""
        better = None if self.better is None else self.better.better()
        if better is None:
            return
        sized_plan, planned = better
        if self.planner.lacks_host_memory(planned.plan):
            return
        logger.info(
            "vdnn: a better plan was found beside the training: the step takes %.2f times that with everything kept "
            "instead of %.2f.",
            planned.slowdown,
            sized_plan.slowdown,
        )
        sized_plan.follow(sized_plan.recording, planned)
        self._tally.improved_one()

    def plan_for_host(self, sized_plan: SizedPlan, host: HostOfPlan) -> None:
        """Called when the host was measured in steps that followed the plan of this size. Plans it again if the host
        needs longer for them than the device. If that has made steps slower, the plan before it is followed again."""
        planner, recording, timeline = self.planner, sized_plan.recording, sized_plan.timeline
        if sized_plan.is_host_misread:
            return
        if sized_plan.follow_as_before_host(host, _SLOWER_FOR_HOST):
            logger.info("vdnn: the plan for the host made steps slower. The plan before it is followed again.")
            self.latest = sized_plan.executor
            return
        sized_plan.host = host
        on_host, costs = planner.on_host(recording, timeline, host)
        now = simulate(on_host, sized_plan.executor.plan, costs)
        sized_plan.is_bound_by_host = now.is_bound_by_host
        is_done = sized_plan.plans_for_host >= _MOST_PLANS_FOR_HOST
        if not sized_plan.is_bound_by_host or planner.policy.name != "auto" or is_done:
            return
        sized_plan.plans_for_host += 1
        with contextlib.suppress(VdnnError), self._planning():
            planned = planner.planned(recording, timeline, sized_plan.tightened_bytes, host=host)
            if planned.simulated.step_ns < (1 - _WORTH_FOR_HOST) * now.step_ns:
                logger.info(
                    "vdnn: the host needs %.1f ms to issue the step, longer than the device. It is planned again, for "
                    "%.1f ms.",
                    now.host_ns / 1e6,
                    planned.simulated.step_ns / 1e6,
                )
                sized_plan.follow_for_host(recording, planned)
                self.latest = sized_plan.executor
                self._tally.improved_one()

    def stop(self) -> None:
        """Cancels the search beside the training."""
        if self.better is not None:
            self.better.stop()

    def _look_for_better(self, sized_plan: SizedPlan) -> None:
        if self.better is not None:
            self.better.ask(sized_plan)

    @contextlib.contextmanager
    def _planning(self) -> Iterator[None]:
        """A context that counts the time of the search for a plan."""
        began_s = time.monotonic()
        try:
            with span("plan"):
                yield
        finally:
            self._planning_s += time.monotonic() - began_s

    def make_from(
        self,
        recording: Recording,
        timeline: Timeline | None,
        below: Recording | None,
        origin: PlanOrigin,
        use: Callable[[SizedPlan], None],
        give_up: Callable[[VdnnError], bool],
    ) -> None:
        """Makes a sized plan for a recorded step. It covers the next smaller one, too, if a plan for both meets the
        budget. If no plan meets the budget, raises the error, unless `give_up` returns True."""
        try:
            with self._planning():
                made = self._planned(recording, timeline, below)
        except VdnnError as error:
            if give_up(error):
                return
            raise
        use(self._sized_plan(*made, timeline, origin))

    def make_for(
        self, prediction: SizePrediction, plans: Sequence[SizedPlan], use: Callable[[SizedPlan], None]
    ) -> None:
        """Makes a sized plan for a predicted step that no plan serves well. `plans` are those of its kind, the largest
        last. The search begins from the one that is nearest in size."""
        planner, timeline, device_bytes = self.planner, plans[-1].timeline, plans[-1].recording.device_bytes

        def room(made: _C.RecordedStep) -> int:
            return planner.budget_of(made, device_bytes) - made.peak_bytes

        with self._planning():
            for recording, is_guess in prediction.steps(room):
                free_bytes = int(_FREE_OF_GUESS * planner.budget_bytes(recording)) if is_guess else 0
                try:
                    planned = planner.planned(recording, timeline, free_bytes, known=_nearest_plan(recording, plans))
                except VdnnError:  # the made step may be larger than the next one
                    continue
                sized_plan = self._sized_plan(
                    recording, planned, timeline, PlanOrigin.GUESSED if is_guess else PlanOrigin.MADE
                )
                sized_plan.tightened_bytes = free_bytes
                use(sized_plan)
                return

    def can_hold(self, sized_plan: SizedPlan, allocated_bytes: int) -> bool:
        """True if some plan for steps of this size meets the budget with `allocated_bytes` at the first save."""
        recording = sized_plan.recording
        budget_bytes = self.planner.fixed_bytes(recording.device_bytes)
        more_bytes = allocated_bytes - first_point(recording).allocated_bytes
        if budget_bytes is None or more_bytes <= 0 or sized_plan.peak_bytes + more_bytes <= budget_bytes:
            return True
        return self.planner.is_feasible(with_more_resident(recording, more_bytes))

    def make_room(self, sized_plan: SizedPlan, allocated_bytes: int) -> None:
        """Plans a size again if more is allocated at the first save than when its step was recorded, such as another
        optimizer's state, and the plan would exceed the budget by it. If no plan meets the budget then, the size is
        planned, once, to meet it in every interval where that is possible. The resident memory may leave the device
        before the peak, as in the second step of a session that streams parameters."""
        recording = sized_plan.recording
        budget_bytes = self.planner.fixed_bytes(recording.device_bytes)
        more_bytes = allocated_bytes - first_point(recording).allocated_bytes
        if more_bytes < 0 and sized_plan.follow_with_room_again(allocated_bytes):
            self.latest = sized_plan.executor
        if budget_bytes is None or more_bytes <= 0 or sized_plan.peak_bytes + more_bytes <= budget_bytes:
            return
        now = with_more_resident(recording, more_bytes)
        where_possible = not (sized_plan.is_over_somewhere or self.planner.is_feasible(now))
        sized_plan.is_over_somewhere |= where_possible
        self._plan_again(sized_plan, now, sized_plan.follow_with_less_room, where_possible=where_possible)

    def leave_room(self, sized_plan: SizedPlan) -> None:
        """Plans a size again, once, with more of the budget free, because some storages of a step were larger than
        planned and others smaller. With more room the guard has to move less."""
        free_bytes = int(_FREE_OF_UNBALANCED * self.planner.budget_bytes(sized_plan.recording))
        if sized_plan.tightened_bytes < free_bytes:
            sized_plan.tightened_bytes = free_bytes
            self._plan_again(sized_plan, sized_plan.recording, sized_plan.follow)

    def tighten(self, sized_plan: SizedPlan, peak_bytes: int, resident_bytes: int) -> None:
        """Plans a size again if a step that followed its plan exceeded the budget: for a budget that is smaller by the
        excess, or for the memory that was resident when the step began."""
        planner, recording, executor = self.planner, sized_plan.recording, sized_plan.executor
        now = with_more_resident(recording, resident_bytes - recording.resident_bytes)
        has_grown = now.resident_bytes > recording.resident_bytes and planner.is_feasible(now)
        if has_grown:
            sized_plan.recording = recording = now
        over_bytes = peak_bytes - planner.budget_bytes(recording)
        if over_bytes <= 0:  # the budget is "min", and the least has risen
            executor.plan = replace(executor.plan, budget_bytes=planner.target_bytes(recording))
            return
        if sized_plan.tightenings >= _MOST_TIGHTENINGS:
            return
        # A step that then met the budget exactly would exceed it by a few bytes, because blocks are aligned.
        free_bytes = over_bytes + int(SLACK * planner.budget_bytes(recording))
        tightened_bytes = sized_plan.tightened_bytes + (0 if has_grown else free_bytes)
        target_bytes = planner.target_bytes(recording, tightened_bytes)
        if not has_grown and target_bytes == executor.plan.budget_bytes:
            _warn_over_budget(sized_plan, peak_bytes, over_bytes)
            return
        sized_plan.tightenings += 1
        sized_plan.tightened_bytes = tightened_bytes
        _warn_tightened(sized_plan, peak_bytes, over_bytes)
        self._plan_again(sized_plan, recording, sized_plan.follow)

    def _plan_again(
        self,
        sized_plan: SizedPlan,
        recording: Recording,
        follow: Callable[[Recording, PlannedStep], None],
        *,
        where_possible: bool = False,
    ) -> None:
        """If no plan meets the smaller budget, the old one stays: it still saves memory."""
        with contextlib.suppress(VdnnError), self._planning():
            planned = self.planner.planned(
                recording,
                sized_plan.timeline,
                sized_plan.tightened_bytes,
                where_possible=where_possible,
                host=sized_plan.host_to_plan_for,
            )
            self._tally.made_again()
            follow(recording, planned)
            self.latest = sized_plan.executor
            self._look_for_better(sized_plan)

    def _planned(
        self, recording: Recording, timeline: Timeline | None, below: Recording | None
    ) -> tuple[Recording, PlannedStep]:
        covered = None if below is None else covering(recording, below)
        if below is not None and covered is not None and covered.managed_bytes > below.managed_bytes:
            try:
                if self.planner.is_feasible(covered):
                    return covered, self.planner.planned(covered, timeline)
            except VdnnError:
                logger.info("vdnn: no plan covers all sizes of this step under the budget, only the last one.")
        return recording, self.planner.planned(recording, timeline)

    def _sized_plan(
        self, recording: Recording, planned: PlannedStep, timeline: Timeline | None, origin: PlanOrigin
    ) -> SizedPlan:
        self._tally.made_one()
        sized_plan = SizedPlan(planned, recording, timeline, origin)
        self.latest = sized_plan.executor
        self._look_for_better(sized_plan)
        return sized_plan


def _nearest_plan(recording: Recording, plans: Sequence[SizedPlan]) -> Plan | None:
    """The plan of the step that saves and uses the same and is nearest in size, or None. The plan of a warm-up
    is left out, because it knows few recipes."""
    order = order_of(recording)
    known = [one for one in plans if one.origin is not PlanOrigin.WARM_UP]
    known.sort(key=lambda one: abs(one.nbytes - recording.managed_bytes))
    return next((one.executor.plan for one in known if order_of(one.recording) == order), None)


def _warn_tightened(sized_plan: SizedPlan, peak_bytes: int, over_bytes: int) -> None:
    logger.warning(
        "vdnn: the step took %s, %s more than its budget: planned again for that much less (%d of at most %d times).",
        format_bytes(peak_bytes),
        format_bytes(over_bytes),
        sized_plan.tightenings,
        _MOST_TIGHTENINGS,
    )


def _warn_over_budget(sized_plan: SizedPlan, peak_bytes: int, over_bytes: int) -> None:
    if not sized_plan.has_warned:
        sized_plan.has_warned = True
        warn(
            f"the step took {format_bytes(peak_bytes)}, {format_bytes(over_bytes)} more than its budget, and no plan "
            "takes less."
        )
