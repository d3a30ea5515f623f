"""The plans that a session follows: a ladder for each kind of step, with a rung for each size.

A step follows a rung of its expected kind: one that serves its size, one that is made for it, or else the highest. If
that kind has no ladder, the step is recorded to make one, as long as there is room; otherwise it follows a rung of a
kind that began alike.

Executed steps are compared with their budget. If a step took more, the book plans again for that much less, or for the
memory that is resident now, a bounded number of times, and logs it. A step that turned out to be of another kind is not
compared.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace

from vdnn.bytesize import format_bytes
from vdnn.errors import VdnnError
from vdnn.planning.planned_step import PlannedStep
from vdnn.planning.simulate import simulate
from vdnn.runtime.steps.alike_kinds import AlikeKinds
from vdnn.runtime.steps.budget_ledger import Over
from vdnn.runtime.steps.executor import Executor
from vdnn.runtime.steps.foresight import require_foreseen_fit
from vdnn.runtime.steps.kinds import Begin, Kind, StepKinds
from vdnn.runtime.steps.ladder import Ladder, Rung, Source
from vdnn.runtime.steps.meter import Meter
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.runtime.steps.save_keys import SaveKeys
from vdnn.runtime.steps.step_tally import StepTally
from vdnn.runtime.torch_internals.spans import span
from vdnn.step.made_steps import covering, first_point, first_save, with_recomputes_of, with_resident
from vdnn.step.plan import Plan
from vdnn.step.plan_use import PlanUse
from vdnn.step.recording import Recording, SaveKey
from vdnn.step.timeline import Timeline
from vdnn.user_warnings import warn

logger = logging.getLogger("vdnn")

# The most kinds of step that have plans (two models in turn, training and another loss).
_MOST_KINDS = 8
_MOST_TIGHTENINGS = 3
# A step that is larger than its plan by no more than this is not planned anew: its guard balances that.
_TOLERANCE = 1.01
# The share of the budget that the plan of a guessed step leaves free.
_FREE_OF_GUESS = 0.05
# What recorded steps told of another one was mistaken if its peak is off by this share, or its time shorter by that.
_MISTAKEN_PEAK = 0.01
_MISTAKEN_TIME = 0.05


class PlanBook:
    """The plans of one session."""

    def __init__(self, plan: Plan | None, planner: BudgetPlanner | None) -> None:
        self._given = None if plan is None else Executor(plan, is_given=True)
        self._planner = planner
        self._kinds = StepKinds()
        self._alike = AlikeKinds()
        self._uses = 0
        self._ladders: dict[Kind, Ladder] = {}
        self._begins: dict[Kind, Begin] = {}  # of the steps of each kind
        self._latest: Executor | None = self._given
        self.records_step = False  # the running step is recorded though it follows a plan that vdnn made
        self.tally = StepTally()

    @property
    def is_planning(self) -> bool:
        return self._planner is not None

    @property
    def latest(self) -> Plan | None:
        return None if self._latest is None else self._latest.plan

    @property
    def rungs(self) -> list[Rung]:
        return [rung for ladder in self._ladders.values() for rung in ladder.rungs]

    def predicted(self) -> tuple[Recording, Timeline] | None:
        """The recording of the latest plan, and its predicted timeline; None if the plan is on no ladder any more."""
        rung = next((one for one in self.rungs if one.executor is self._latest), None)
        if rung is None or self._planner is None:
            return None
        return rung.recording, simulate(rung.recording, rung.executor.plan, self._planner.costs(rung.timeline))

    @property
    def use(self) -> PlanUse | None:
        """For reports. None if the session makes no plans."""
        return self.tally.plan_use(self._ladders.values()) if self.is_planning else None

    @property
    def first_difference(self) -> str | None:
        executors = [rung.executor for rung in self.rungs] if self._given is None else [self._given]
        return next((one.first_difference for one in executors if one.first_difference), None)

    def forget_made(self) -> None:
        """Forget the plans made so far: their recordings were not whole steps."""
        if self._given is None:
            self._ladders.clear()
            self._begins.clear()
            self._latest = None
            self._kinds = StepKinds()
            self.tally = StepTally()

    def choose(self, keys: SaveKeys, allocated_bytes: int) -> Executor | None:
        """The executor for the step of which `keys` has the first save; None if the step may be recorded. All steps
        follow a plan that the user gave; steps that differ from it report how. `allocated_bytes` are allocated now."""
        if self._given is not None:
            return self._given
        first, begin = keys.first, keys.begin
        if first is None or begin is None:
            return None
        expected = self._kinds.expected(begin)
        ladder = None if expected is None else self._ladders.get(expected.kind)
        is_other = ladder is None
        if ladder is None:
            alike = [kind for kind, one in self._begins.items() if one.is_like(begin)]
            if not alike:
                return None
            nearest = max(alike, key=lambda kind: (self._begins[kind] == begin, self._ladders[kind].last_used))
            ladder = self._ladders[nearest]
        rung = ladder.choose(first)
        if rung is None or rung.is_far_above(first):
            rung = self._made(ladder, first, begin) or rung
        if rung is None and ladder.is_far_below(first):
            return None
        has_room = len(self._ladders) < _MOST_KINDS
        self.records_step = rung is None or ladder.records_all or ladder.learns_from(first) or (is_other and has_room)
        if rung is None:
            rung = ladder.rungs[-1]
        elif ladder.deserves_own(rung, first):
            self.records_step = True
        self.records_step |= rung.is_guess
        self._make_room(rung, allocated_bytes)
        self._uses += 1
        ladder.last_used = self._uses
        rung.steps += 1
        self.tally.chose(ladder, rung)
        self._latest = rung.executor
        return rung.executor

    def _make_room(self, rung: Rung, allocated_bytes: int) -> None:
        """Plans a rung again if more is allocated at the first save than when its step was recorded, such as another
        optimizer's state, and the plan would exceed the budget by it."""
        planner, recording = self._planner, rung.recording
        if planner is None:
            return
        budget_bytes = planner.fixed_bytes(recording.device_bytes)
        more_bytes = allocated_bytes - first_point(recording).allocated_bytes
        if budget_bytes is None or more_bytes <= 0 or rung.peak_bytes + more_bytes <= budget_bytes:
            return
        now = with_resident(recording, recording.resident_bytes + more_bytes)
        with contextlib.suppress(VdnnError), span("plan"):  # no plan takes so little: the old one takes less than none
            rung.follow(now, planner.planned(now, rung.timeline, rung.tightened_bytes))
            self.tally.made_tighter()

    def _made(self, ladder: Ladder, first: SaveKey, begin: Begin) -> Rung | None:
        """A rung for a step that no rung serves well, if the steps that were recorded tell enough about it."""
        planner = self._planner
        if planner is None:
            return None
        timeline = ladder.rungs[-1].timeline
        alike = [self._ladders[kind] for kind, one in self._begins.items() if one.is_like(begin)]
        others = [one for one in alike if one is not ladder]

        def fits(made: Recording) -> bool:
            return made.peak_bytes <= planner.budget_bytes(made)

        for recording, is_guess in ladder.made_for(first, fits, others):
            free_bytes = int(_FREE_OF_GUESS * planner.budget_bytes(recording)) if is_guess else 0
            try:
                with span("plan"):
                    planned = planner.planned(recording, timeline, free_bytes)
            except VdnnError:  # what was made may be larger than what comes
                continue
            self.tally.made += 1
            rung = Rung(planned, recording, timeline, Source.GUESSED if is_guess else Source.MADE)
            rung.tightened_bytes = free_bytes
            ladder.add(rung)
            return rung
        return None

    def tell_kind(self, keys: SaveKeys) -> None:
        """Called first when a step has ended: its kind may be one that it is like."""
        if self._planner is not None and keys.begin is not None:
            keys.kind = self._alike.kind_for(keys.kind, keys.begin, keys.saves)

    def require_foreseen_fit(self, keys: SaveKeys, resident_bytes: int) -> None:
        """Raises BudgetError if a step that begins so is above all rungs, and over the budget under every plan."""
        if self._planner is None or keys.first is None:
            return
        alike = [self._ladders[kind] for kind, begin in self._begins.items() if begin == keys.begin]
        if len(alike) == 1:  # else the kind of the step is not known yet
            require_foreseen_fit(self._planner, alike[0], keys.first, resident_bytes)

    def ended(self, keys: SaveKeys) -> None:
        """Note the kind of a finished step."""
        if self._planner is not None and keys.begin is not None:
            self._kinds.ended(keys.begin, keys.kind)
            self.tally.ended(keys.first, self._ladders.get(keys.kind))

    def recorded(
        self, recording: Recording, timeline: Timeline | None, keys: SaveKeys, followed: Executor | None = None
    ) -> None:
        """Make a plan for a recorded step, if there is a planner and no plan serves the step yet. `timeline` is that of
        the recorded step. `followed`: it followed this plan."""
        begin = keys.begin
        self.tally.recorded()
        if self._planner is None or not recording.lifetimes or begin is None:
            return
        found, ladder = recording, self._ladders.get(keys.kind)
        first = first_save(found)
        like = ladder or self._ladder_of(followed)
        foretold = None if like is None else like.foretold(first)
        if foretold is not None:
            found = with_recomputes_of(foretold, found)
        if ladder is not None:
            ladder.note(found, has_own_recomputes=followed is None)
            if followed is None and ladder.find_near(first, found):
                return
        if followed is not None and not self._needs_plan(followed, keys, found, foretold):
            return
        with span("plan"):
            recording, planned = self._planned(found, timeline, ladder)
        if ladder is None:
            while len(self._ladders) >= _MOST_KINDS:
                oldest = min(self._ladders, key=lambda kind: self._ladders[kind].last_used)
                del self._ladders[oldest], self._begins[oldest]
            ladder = self._ladders[keys.kind] = Ladder()
            self._begins[keys.kind] = begin
            ladder.note(found, has_own_recomputes=followed is None)
        self._uses += 1
        self.tally.made += 1
        ladder.last_used = self._uses
        rung = Rung(planned, recording, timeline)
        self._latest = rung.executor
        ladder.add(rung)

    def _needs_plan(self, followed: Executor, keys: SaveKeys, recording: Recording, foretold: Recording | None) -> bool:
        """True if a step that followed a plan was larger, or so much smaller that it deserves another one, or not what
        was foretold of it."""
        ladder, rung = self._ladders.get(keys.kind), self._rung_of(followed, keys.kind)
        if ladder is None:
            return len(self._ladders) < _MOST_KINDS
        if rung is None or keys.first is None:
            return False  # it followed a plan of another kind, and its own has some
        if rung.is_guess or (foretold is not None and _is_mistaken(rung, foretold, recording)):
            ladder.drop(rung)
            return True
        if followed.has_grown:
            return recording.managed_bytes > _TOLERANCE * rung.nbytes
        rung.served(keys.first)
        return ladder.deserves_own(rung, keys.first)

    def _planned(
        self, recording: Recording, timeline: Timeline | None, ladder: Ladder | None
    ) -> tuple[Recording, PlannedStep]:
        """Plans a step, or the step that covers it and those of the highest rung, if that can meet the budget."""
        if self._planner is None:
            raise RuntimeError("expected a planner, got none")
        if ladder is not None and ladder.rungs:
            highest = ladder.rungs[-1]
            covered = covering(recording, highest.recording)
            is_higher = covered is not None and covered.managed_bytes > highest.nbytes
            if covered is not None and is_higher and self._planner.is_feasible(covered):
                try:
                    return covered, self._planner.planned(covered, timeline)
                except VdnnError:
                    logger.info("vdnn: no plan covers all sizes of this step under the budget, only the last one.")
        return recording, self._planner.planned(recording, timeline)

    def _ladder_of(self, executor: Executor | None) -> Ladder | None:
        """The ladder that has this executor."""
        return next(
            (one for one in self._ladders.values() if any(rung.executor is executor for rung in one.rungs)), None
        )

    def _rung_of(self, executor: Executor, kind: Kind) -> Rung | None:
        """The rung of this kind that has this executor."""
        ladder = self._ladders.get(kind)
        return None if ladder is None else next((one for one in ladder.rungs if one.executor is executor), None)

    def room_bytes(self, followed: Executor, budget_bytes: int, allocated_bytes: int) -> int | None:
        """The part of the budget that a step leaves if it follows this plan, and `allocated_bytes` are allocated at its
        first save. Negative if more is allocated than when the step was recorded. None for the plan of the user."""
        rung = next((one for one in self.rungs if one.executor is followed), None)
        if rung is None:
            return None
        more_bytes = max(0, allocated_bytes - first_point(rung.recording).allocated_bytes)
        return max(0, budget_bytes - rung.peak_bytes) - more_bytes

    def judged(self, executor: Executor | None, kind: Kind, device_bytes: int) -> tuple[int, Over] | None:
        """The budget of a finished step, and the cause if it took more; None if it has no budget yet."""
        budget_bytes = None if self._planner is None else self._planner.fixed_bytes(device_bytes)
        if budget_bytes is None and executor is not None:  # the budget "min", or a plan that the user gave
            budget_bytes = executor.plan.budget_bytes
        if budget_bytes is None:
            return None
        if executor is None:
            return budget_bytes, Over.NO_PLAN
        if executor.differences:
            return budget_bytes, Over.DIFFERED
        is_own = executor is self._given or self._rung_of(executor, kind) is not None
        return budget_bytes, Over.MORE_THAN_PLANNED if is_own else Over.ANOTHER_PLAN

    def executed(self, executor: Executor, meter: Meter, kind: Kind) -> None:
        """Compare a finished step that followed a plan with the plan's budget."""
        rung, planner = self._rung_of(executor, kind), self._planner
        if rung is None or planner is None:
            return
        self._ladders[kind].records_all |= executor.has_grown
        recording = rung.recording
        if executor.differences or meter.peak_bytes <= planner.budget_bytes(recording):
            return
        # The resident memory may have grown since the recording, for example by another optimizer's state.
        now = with_resident(recording, meter.resident_bytes)
        has_grown = now.resident_bytes > recording.resident_bytes and planner.is_feasible(now)
        if has_grown:
            rung.recording = recording = now
        over_bytes = meter.peak_bytes - planner.budget_bytes(recording)
        if over_bytes <= 0:  # the budget is "min", and the least has risen
            executor.plan = replace(executor.plan, budget_bytes=planner.target_bytes(recording))
            return
        if rung.tightenings >= _MOST_TIGHTENINGS:
            return
        tightened_bytes = rung.tightened_bytes + (0 if has_grown else over_bytes)
        target_bytes = planner.target_bytes(recording, tightened_bytes)
        if not has_grown and target_bytes == executor.plan.budget_bytes:
            _warn_over_budget(rung, meter.peak_bytes, over_bytes)
            return
        rung.tightenings += 1
        rung.tightened_bytes = tightened_bytes
        _warn_tightened(rung, meter.peak_bytes, over_bytes)
        planned = planner.planned(recording, rung.timeline, tightened_bytes)
        self.tally.made_tighter()
        rung.follow(recording, planned)
        self._latest = rung.executor


def _is_mistaken(rung: Rung, foretold: Recording, recorded: Recording) -> bool:
    """True if the step that followed this rung is not what was foretold of it."""
    wrong_bytes = abs(recorded.peak_bytes - foretold.peak_bytes)
    is_shorter = recorded.compute_ns < (1 - _MISTAKEN_TIME) * foretold.compute_ns
    is_made = rung.source is not Source.RECORDED
    return is_made and (is_shorter or wrong_bytes > _MISTAKEN_PEAK * recorded.peak_bytes)


def _warn_tightened(rung: Rung, peak_bytes: int, over_bytes: int) -> None:
    logger.warning(
        "vdnn: the step took %s, %s more than its budget: planned again for that much less (%d of at most %d times).",
        format_bytes(peak_bytes),
        format_bytes(over_bytes),
        rung.tightenings,
        _MOST_TIGHTENINGS,
    )


def _warn_over_budget(rung: Rung, peak_bytes: int, over_bytes: int) -> None:
    if not rung.has_warned:
        rung.has_warned = True
        warn(
            f"the step took {format_bytes(peak_bytes)}, {format_bytes(over_bytes)} more than its budget, and no plan "
            "takes less."
        )
