"""The plans that a session follows: a plan table for each kind of step, with a sized plan for each planned size.

A step follows a plan of its expected kind: one that serves its size, one that is made for its size, or else the
largest. If that kind has no plan table, the step is recorded to make one, as long as there is room; otherwise it
follows a plan of a kind that began alike.

Executed steps are compared with their budget. If a step took more, the book plans again, for a budget that is smaller
by the excess or for the memory that is resident now. It does so a bounded number of times, and logs each. A step that
turned out to be of another kind is not compared. If a step took more because it saved other things than its plan (a
loss term that begins, layers that are frozen), the next one like it is recorded, and gets a plan of its own.

[Note: Foresight] A step that cannot fit its budget is refused when it begins: from its first save and the steps
recorded so far, by an estimate that is no larger than the step (vdnn/step/lower_estimate.py). All other steps run,
under a plan or the guard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from vdnn.errors import BudgetError, VdnnError
from vdnn.planning.least_memory import require_feasible_budget
from vdnn.planning.policies import OnlinePolicy
from vdnn.planning.simulate import simulate
from vdnn.runtime.steps.earlier_graphs import naming_earlier_graphs
from vdnn.runtime.steps.executor import Executor
from vdnn.runtime.steps.host_meter import HostOfPlan
from vdnn.runtime.steps.kinds import AlikeKinds, Begin, Kind, StepKinds, Unplannable
from vdnn.runtime.steps.measurement import MeasuredStep, Over
from vdnn.runtime.steps.plan_store import PlanFolder, PlanStore
from vdnn.runtime.steps.plan_table import PlanOrigin, PlanTable, SizedPlan, StepTally, is_mistaken, needs_plan
from vdnn.runtime.steps.planner import BudgetPlanner, PlanMaker
from vdnn.runtime.steps.repeated_steps import ObservedStep, RepeatedSteps
from vdnn.runtime.steps.save_keys import SaveKeys
from vdnn.runtime.steps.size_model import RecordedSizes
from vdnn.runtime.steps.watched_step import WatchedStep
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.step.lower_estimate import lower_estimate
from vdnn.step.made_steps import first_point, first_save, with_more_resident, with_recomputes_of, with_resident
from vdnn.step.plan import Plan
from vdnn.step.plan_use import PlanUse
from vdnn.step.recording import Recording, SaveKey
from vdnn.step.timeline import Timeline, host_sentence

# The most kinds of step that have plans (two models in turn, training and another loss).
_MOST_KINDS = 8
# Steps that are recorded after one that differed from its plan and exceeded the budget: the program may take turns.
_RECORDED_MISFITS = 2
_MOST_UNFORESEEN = 8  # a share of the budget
_MOST_COMPARED = 3  # plans that are made to predict steps with more memory resident: of the steps that came most often
_REMEMBERED = 24  # kinds of the last steps, for the next run
# Called before a step is refused, with its recording, if it has ended. True if the step continues: see StepWatch.
Refused = Callable[[VdnnError, Recording | None], bool]


def is_refused(error: VdnnError, recording: Recording | None) -> bool:
    """Every step that does not fit is."""
    return False


class _Finished(NamedTuple):
    """A finished step that was recorded. `has_grown`: it was larger than the plan that it followed. `has_differed`: it
    saved other things."""

    measured: MeasuredStep
    kind: Kind
    begin: Begin
    followed: Executor | None
    has_grown: bool
    has_differed: bool
    is_warm_up: bool
    is_over: bool
    earlier_bytes: int


class PlanBook:
    """The plans of one session."""

    def __init__(
        self,
        plan: Plan | None,
        planner: BudgetPlanner | None,
        folder: PlanFolder | None = None,
        refused: Refused = is_refused,
        online: OnlinePolicy | None = None,
    ) -> None:
        """`refused` is called before a step is refused, see StepWatch. `online` decides in steps that nothing plans."""
        self._refused = refused
        self._repeats = online.name if online is not None and online.is_repeatable else None
        self._given = None if plan is None else Executor(plan, is_given=True)
        self._planner = planner
        self._alike = AlikeKinds()
        self._own_kind: Kind | None = None  # of the step that ended last, before it was taken for one that it is like
        self._uses = 0
        self.unforeseen_bytes = 0  # that steps which differed from their plans took above their budgets
        self.records_step = False  # the running step is recorded, if it follows a plan that vdnn made or waits for one
        self.follows_stored = False  # the running step follows a plan that an earlier run made
        self._store = None if folder is None or planner is None else PlanStore(folder, planner)
        self._begin()

    def _begin(self) -> None:
        self._kinds = StepKinds()
        self._tables: dict[Kind, PlanTable] = {}
        self._begins: dict[Kind, Begin] = {}  # of the steps of each kind
        self.tally = StepTally()
        self._made_before = 0  # at the last call of take_host_bytes()
        self._made_when_ended = 0  # when the step before ended
        self._was_last_quiet = False  # no plan was made in the last step
        self._made_when_stored = 0
        self._restored = 0  # sized plans of earlier runs
        self._asked_for: set[Begin] = set()  # of steps for which the store was asked
        self._order: deque[tuple[Begin, Kind]] = deque(maxlen=_REMEMBERED)
        self._maker = None if self._planner is None else PlanMaker(self._planner, self.tally)
        self._unplannable = Unplannable()
        self._repeated = None if self._repeats is None else RepeatedSteps(self._repeats)

    @property
    def is_planning(self) -> bool:
        return self._planner is not None

    @property
    def is_virtual(self) -> bool:
        """True in virtual time, where planning is always finished before the next step."""
        return self._planner is not None and self._planner.profile is not None

    @property
    def latest(self) -> Plan | None:
        latest = self._given if self._maker is None else self._maker.latest
        return None if latest is None else latest.plan

    @property
    def plans(self) -> list[SizedPlan]:
        return [sized_plan for table in self._tables.values() for sized_plan in table.plans]

    @property
    def host_lines(self) -> list[str]:
        """For reports: how long the host needs to issue the step that the latest plan is for, if it was measured."""
        sized_plan = self._latest_plan()
        if sized_plan is not None and sized_plan.host is not None and sized_plan.is_host_misread:
            seemed = f"{sized_plan.host.issue_ns / 1e6:.2f} ms"
            return [f"host: seemed to need {seemed} to issue the step, but a plan for that made steps slower"]
        found = None if sized_plan is None or sized_plan.host is None else self.predicted()
        if found is None:
            return []
        step = found[1]
        return [
            host_sentence(f"{step.host_ns / 1e6:.2f} ms", step.host_ns, step.step_ns, is_bound=step.is_bound_by_host)
        ]

    @property
    def latest_recording(self) -> Recording | None:
        """The step that the latest plan was made from; None if no plan table has that plan any more."""
        sized_plan = self._latest_plan()
        return None if sized_plan is None else sized_plan.recording

    def predicted(self) -> tuple[Recording, Timeline] | None:
        """The recording of the latest plan, with the memory that was resident in the last step under it, and the
        predicted timeline; None if no plan table still has that plan."""
        sized_plan = self._latest_plan()
        if sized_plan is None or self._planner is None:
            return None
        recording = sized_plan.recording
        if sized_plan.more_bytes:
            recording = with_more_resident(recording, sized_plan.more_bytes)
        recording, costs = self._planner.on_host(recording, sized_plan.timeline, sized_plan.host_to_plan_for)
        return recording, simulate(recording, sized_plan.executor.plan, costs)

    def _latest_plan(self) -> SizedPlan | None:
        maker = self._maker
        return None if maker is None else next((one for one in self.plans if one.executor is maker.latest), None)

    # With more memory resident, such as an optimizer's state.

    @property
    def are_settled(self) -> bool:
        """True if the last step made no plan, and plans that vdnn made for good serve all kinds of steps."""
        plans = [table.plans[-1] for table in self._tables.values() if table.plans]
        is_for_good = not any(sized_plan.is_provisional for sized_plan in plans)
        is_for_good &= not any(table.is_of_other_state for table in self._tables.values())
        return self._was_last_quiet and bool(plans) and is_for_good

    def fits_with(self, more_bytes: int) -> bool:
        """True if every planned step could be planned with this many more bytes resident."""
        planner = self._planner
        return planner is not None and all(
            planner.is_feasible(with_more_resident(sized_plan.recording, more_bytes)) for sized_plan in self.plans
        )

    def predicted_ns(self, more_bytes: int) -> int | None:
        """Predicts the mean time of the steps that plans serve, with this many more bytes resident. None if they do not
        fit the budget."""
        planner, total_ns, steps = self._planner, 0.0, 0
        followed = sorted((one for one in self.plans if one.steps), key=lambda one: one.steps)[-_MOST_COMPARED:]
        if planner is None or not self.fits_with(more_bytes):
            return None
        for sized_plan in followed:
            slowdown = sized_plan.slowdown
            if more_bytes:
                recording = with_more_resident(sized_plan.recording, more_bytes)
                try:
                    slowdown = planner.planned(recording, sized_plan.timeline, sized_plan.tightened_bytes).slowdown
                except VdnnError:
                    return None
            total_ns += sized_plan.steps * slowdown * sized_plan.recording.kept_ns
            steps += sized_plan.steps
        return round(total_ns / steps) if steps else None

    @property
    def use(self) -> PlanUse | None:
        """For reports. None if the session makes no plans."""
        return self.tally.plan_use(self._tables.values()) if self.is_planning else None

    @property
    def stored_lines(self) -> list[str]:
        """For reports: what the plan folder had."""
        return [] if self._store is None else self._store.lines

    @property
    def first_difference(self) -> str | None:
        executors = [sized_plan.executor for sized_plan in self.plans] if self._given is None else [self._given]
        return next((one.first_difference for one in executors if one.first_difference), None)

    def forget_made(self) -> None:
        """Forget the plans made so far: their recordings were not whole steps."""
        self.stop_searching()
        self._begin()

    def leave_room_for(self, unrecorded_bytes: int) -> None:
        """Makes later plans leave room for memory that recordings do not have: see BudgetPlanner."""
        if self._planner is not None:
            self._plan_with(replace(self._planner, unrecorded_bytes=unrecorded_bytes))

    def leave_host_to(self, state_bytes: int, room_beside: Callable[[int], int]) -> None:
        """Makes later plans leave this much of the host's memory to training state. `room_beside`: see
        BudgetPlanner."""
        if self._planner is not None and self._planner.state_bytes != state_bytes:
            self._plan_with(replace(self._planner, state_bytes=state_bytes, room_beside_state=room_beside))

    def _plan_with(self, planner: BudgetPlanner) -> None:
        self._planner = planner
        if self._maker is not None:
            self._maker.planner = planner

    def record_anew(self, more_bytes: int) -> None:
        """Called when other training state is on the device from now on. Each kind of step follows its plan once more,
        is recorded meanwhile, and is planned anew. Such a step takes `more_bytes` that are not allocated when it
        begins."""
        for table in self._tables.values():
            table.is_of_other_state, table.more_bytes = True, more_bytes

    def stop_searching(self) -> None:
        """Cancels the search for better plans beside the training, until the next step."""
        if self._maker is not None:
            self._maker.stop()

    def restore(self, keys: SaveKeys, modules: ModuleWatch, transport: Transport) -> None:
        """Called when a step begins. Takes the plan tables that an earlier run stored for steps that begin alike."""
        store, begin = self._store, keys.begin
        if store is None or begin is None or begin in self._asked_for:
            return
        self._asked_for.add(begin)
        stack = modules.stack()
        restored, order = store.restored(begin, stack[0] if stack else None, transport)
        kinds = [one.keys.kind for one in restored]
        for kind, (known, table) in zip(kinds, restored, strict=True):
            self._tables[kind], self._begins[kind] = table, begin
            self._alike.add(kind, begin, known.saves)
            self._restored += len(table.plans)
        self._kinds.learn((begin, kinds[number]) for number in (*range(len(kinds)), *order))

    @property
    def stores(self) -> bool:
        return self._store is not None

    def store_no_more(self) -> None:
        self._store = None

    def store(self) -> None:
        """Writes the plans to the plan folder, if some were made since the last call."""
        if self._store is not None and self.tally.changes != self._made_when_stored:
            self._made_when_stored = self.tally.changes
            self._store.store(self._tables, self._begins, [kind for _, kind in self._order])

    def forget_stored(self) -> None:
        """Removes the plans from the plan folder, because one of them recomputed a wrong value."""
        if self._store is not None:
            self._store.forget()

    def repeated(self, keys: SaveKeys) -> tuple[Executor | None, ObservedStep | None]:
        """The object that repeats or observes the step that `keys` begins, if its policy is repeatable."""
        return (None, None) if self._repeated is None else self._repeated.choose(keys)

    def choose(
        self, keys: SaveKeys, allocated_bytes: int, free_state: Callable[[], int] = lambda: 0
    ) -> Executor | None:
        """The executor for the step of which `keys` has the first save; None if the step follows no plan. All steps
        follow a plan that the user gave; steps that differ from it report how. `allocated_bytes` are allocated now.
        `free_state` is called if no plan serves this step with these bytes allocated: see [Note: State leaves again] in
        state_room.py. It returns the bytes that it frees."""
        if self._given is not None:
            return self._given
        first, begin, maker = keys.first, keys.begin, self._maker
        self.follows_stored = False
        if first is None or begin is None or maker is None:
            return None
        maker.take_over()
        expected = self._kinds.expected(begin)
        table = None if expected is None else self._tables.get(expected)
        is_new = table is None
        has_plan = table is not None and table.choose(first) is not None
        if expected is not None and not has_plan and self._unplannable.has(expected, first, allocated_bytes):
            self.records_step = False
            return None
        table = table or self._alike_table(begin)
        if table is None:
            self.records_step = is_new
            return None
        is_new = is_new and len(self._tables) < _MOST_KINDS
        sized_plan = self._best_plan(table, first, begin, maker)
        self.records_step = is_new or sized_plan is None or table.records_all or table.recorded.learns_from(first)
        if sized_plan is None and (table.is_far_below(first) or table.recorded.is_of_warm_up):
            return None
        is_served = sized_plan is not None
        if sized_plan is None:
            sized_plan = table.plans[-1]
        first_bytes = allocated_bytes
        allocated_bytes += table.more_bytes
        if not is_served or not maker.can_hold(sized_plan, allocated_bytes):
            freed_bytes = free_state()
            allocated_bytes, first_bytes = allocated_bytes - freed_bytes, first_bytes - freed_bytes
        sized_plan.misfit_steps = max(0, sized_plan.misfit_steps - 1)
        self.records_step |= sized_plan.is_provisional or sized_plan.is_misfit or table.is_of_other_state
        self.records_step |= table.deserves_own(sized_plan, first) and maker.may_improve
        maker.make_room(sized_plan, allocated_bytes)
        sized_plan.more_bytes = max(0, first_bytes - first_point(sized_plan.recording).allocated_bytes)
        self._uses += 1
        table.last_used = self._uses
        sized_plan.steps += 1
        self.tally.chose(table, sized_plan)
        maker.latest = sized_plan.executor
        self.follows_stored = sized_plan.is_stored
        return sized_plan.executor

    def take_host_bytes(self) -> int | None:
        """The most that a plan of this book offloads; None if no plan was made since the last call."""
        made = self.tally.changes + self._restored
        if made == self._made_before:
            return None
        self._made_before = made
        return max((sized_plan.executor.plan.offloaded_bytes for sized_plan in self.plans), default=None)

    def _alike_table(self, begin: Begin) -> PlanTable | None:
        """The plan table of a kind with this begin, or with a similar one."""
        alike = [kind for kind, one in self._begins.items() if one.is_like(begin)]
        if not alike:
            return None
        return self._tables[max(alike, key=lambda kind: (self._begins[kind] == begin, self._tables[kind].last_used))]

    def _best_plan(self, table: PlanTable, first: SaveKey, begin: Begin, maker: PlanMaker) -> SizedPlan | None:
        """The sized plan for steps with this first save. Makes a better one first if recorded steps predict the
        step."""
        sized_plan = table.choose(first)
        if sized_plan is not None and not (sized_plan.is_far_above(first) and maker.may_improve):
            return sized_plan
        alike = [self._tables[kind] for kind, one in self._begins.items() if one.is_like(begin)]
        others = [one.recorded for one in alike if one is not table]
        prediction = table.recorded.prediction_for(first, others, is_served=sized_plan is not None)
        if prediction is not None:
            maker.make_for(prediction, table.plans, table.add)
        return table.choose(first)

    def tell_kind(self, keys: SaveKeys) -> None:
        """Called first when a step has ended. Finds the earlier kind whose plans its kind shares."""
        if self._planner is not None and keys.begin is not None:
            self._own_kind = keys.kind
            keys.kind = self._alike.kind_for(keys.kind, keys.begin, keys.saves)

    def require_foreseen_fit(self, keys: SaveKeys, resident_bytes: int, earlier_bytes: int) -> None:
        """Raises BudgetError if a step with this begin is larger than all planned ones, and over the budget under every
        plan. Graphs of earlier steps hold `earlier_bytes` of the `resident_bytes`."""
        if self._planner is None or keys.first is None:
            return
        alike = [self._tables[kind] for kind, begin in self._begins.items() if begin == keys.begin]
        if len(alike) == 1:  # else the kind of the step is not known yet
            require_foreseen_fit(self._planner, alike[0], keys.first, resident_bytes, earlier_bytes)

    def ended(self, step: WatchedStep) -> None:
        """Notes the kind of a finished step."""
        keys = step.keys
        if self._repeated is not None:
            self._repeated.ended(keys, step.executor, step.observed)
        if self._planner is not None and keys.begin is not None:
            self._kinds.ended(keys.begin, keys.kind)
            self._order.append((keys.begin, keys.kind))
            self.tally.ended(keys.first, self._tables.get(keys.kind))
            self._was_last_quiet = self.tally.changes == self._made_when_ended
            if self._was_last_quiet:
                self.store()
            self._made_when_ended = self.tally.changes

    def recorded(
        self,
        measured: MeasuredStep,
        keys: SaveKeys,
        followed: Executor | None = None,
        is_warm_up: bool = False,
        is_over: bool = False,
        earlier_bytes: int = 0,
    ) -> None:
        """Make a plan for a recorded step, if there is a planner and no plan serves the step yet. `followed`: the plan
        that it followed. `is_over`: without a plan it took more than its budget. `earlier_bytes`: the bytes that graphs
        of earlier steps held on the device."""
        self.tally.recorded()
        begin, kind, maker = keys.begin, keys.kind, self._maker
        if maker is None or begin is None:
            return
        has_grown = followed is not None and followed.has_grown
        has_differed = followed is not None and followed.differences > 0
        step = _Finished(measured, kind, begin, followed, has_grown, has_differed, is_warm_up, is_over, earlier_bytes)
        self._plan(maker, measured.recording, measured.timeline, step)
        if has_differed:
            for sized_plan in self.plans:
                sized_plan.misfit_steps *= sized_plan.executor is not followed

    def _plan(
        self,
        maker: PlanMaker,
        recording: Recording | None,
        timeline: Timeline | None,
        step: _Finished,
    ) -> None:
        kind, followed = step.kind, step.followed
        table = self._tables.get(kind)
        if recording is None or not recording.lifetimes:
            return
        first, like = first_save(recording), table or self._table_of(followed)
        predicted = None if like is None else like.recorded.predicted(first)
        if predicted is not None:
            recording = with_recomputes_of(predicted, recording)
            step.measured.add_recomputes(recording)
        has_own_recomputes, wrong = followed is None or followed.keeps_everything, None
        is_first_like_it = table is None or table.is_of_other_state
        if table is not None and not is_first_like_it:
            table.recorded.note(recording, has_own_recomputes=has_own_recomputes, is_warm_up=step.is_warm_up)
            sized_plan = None if followed is None else table.plan_of(followed)
            # Not the step that showed the misfit: it may be a passing one, and the next one like it is recorded.
            is_misfit = (
                sized_plan is not None and step.has_differed and 0 < sized_plan.misfit_steps <= _RECORDED_MISFITS
            )
            if sized_plan is not None and (
                is_misfit or sized_plan.is_provisional or is_mistaken(sized_plan, predicted, recording)
            ):
                table.replaced += is_misfit
                wrong = sized_plan
            elif not needs_plan(
                table, sized_plan, recording, is_planned=followed is not None, has_grown=step.has_grown
            ):
                if sized_plan is not None and step.has_grown:
                    maker.leave_room(sized_plan)
                return
        new = RecordedSizes(recording, has_own_recomputes=has_own_recomputes, is_warm_up=step.is_warm_up)
        below = None if table is None or is_first_like_it else table.largest_without(wrong)

        def use(sized_plan: SizedPlan) -> None:
            self._uses += 1
            if table is not None and is_first_like_it:
                del self._tables[kind], self._begins[kind]  # with all that was recorded of such steps
            mine = self._table_for(kind, step.begin, new)
            mine.last_used = self._uses
            mine.replace(wrong, sized_plan)

        def give_up(error: VdnnError) -> bool:
            if (step.is_over or not step.is_warm_up) and self._refused(error, recording):
                return True
            if all(sized_plan.origin is PlanOrigin.WARM_UP for sized_plan in self.plans):
                if step.earlier_bytes and isinstance(error, BudgetError):
                    raise naming_earlier_graphs(error, step.earlier_bytes)
                return step.is_warm_up  # it may have taken more than later ones do
            self._unplannable.note(kind, recording, error)
            return True

        origin = PlanOrigin.WARM_UP if step.is_warm_up else PlanOrigin.RECORDED
        maker.make_from(recording, timeline, None if below is None else below.recording, origin, use, give_up)

    def _table_for(self, kind: Kind, begin: Begin, recorded: RecordedSizes) -> PlanTable:
        """The plan table of a kind. If it has none, a new one that begins with these recorded steps."""
        if kind not in self._tables:
            while len(self._tables) >= _MOST_KINDS:
                oldest = min(self._tables, key=lambda one: self._tables[one].last_used)
                del self._tables[oldest], self._begins[oldest]
            self._tables[kind], self._begins[kind] = PlanTable(recorded), begin
        return self._tables[kind]

    def _table_of(self, executor: Executor | None) -> PlanTable | None:
        """The plan table that has this executor."""
        if executor is None:
            return None
        return next((one for one in self._tables.values() if one.plan_of(executor) is not None), None)

    def _plan_of(self, executor: Executor, kind: Kind) -> SizedPlan | None:
        """The sized plan of this kind that has this executor."""
        table = self._tables.get(kind)
        return None if table is None else table.plan_of(executor)

    def room_bytes(self, followed: Executor, budget_bytes: int, allocated_bytes: int) -> int | None:
        """The part of the budget that a step leaves free if it follows this plan with `allocated_bytes` at its first
        save. Negative if more is allocated than when the step was recorded. None for the plan of the user."""
        sized_plan = next((one for one in self.plans if one.executor is followed), None)
        if sized_plan is None:
            return None
        more_bytes = max(0, allocated_bytes - first_point(sized_plan.recording).allocated_bytes)
        return max(0, budget_bytes - sized_plan.peak_bytes) - more_bytes

    def host_measured(self, executor: Executor, host: HostOfPlan) -> None:
        """Called between two steps, when the host was measured in some that followed this plan."""
        sized_plan = next((one for one in self.plans if one.executor is executor), None)
        if sized_plan is not None and self._maker is not None:
            self._maker.plan_for_host(sized_plan, host)

    def judged(self, step: WatchedStep, device_bytes: int, earlier_bytes: int) -> tuple[int, Over] | None:
        """The budget of a finished step, and the cause if it took more; None if it has no budget yet. Graphs of earlier
        steps held `earlier_bytes` on the device."""
        executor, kind, resident_bytes = step.executor, step.keys.kind, step.resident_bytes
        budget_bytes = None if self._planner is None else self._planner.fixed_bytes(device_bytes)
        if budget_bytes is None and executor is not None:  # the budget "min", or a plan that the user gave
            budget_bytes = executor.plan.budget_bytes
        if budget_bytes is None:
            return None
        sized_plan = None if executor is None else self._plan_of(executor, kind)
        if 0 < step.peak_bytes - budget_bytes <= earlier_bytes:
            return budget_bytes, Over.EARLIER_GRAPHS
        # A step that saved other things says nothing about the step that the plan is for.
        differs = executor is not None and executor.differences > 0
        is_too_large = (
            sized_plan is not None and sized_plan.least_bytes(resident_bytes) > budget_bytes >= sized_plan.peak_bytes
        )
        if (is_too_large and not differs) or self._unplannable.has(kind, step.keys.first, resident_bytes):
            return budget_bytes, Over.TOO_LARGE
        if executor is None:
            return budget_bytes, Over.NO_PLAN
        if differs:
            over_bytes = max(0, step.peak_bytes - budget_bytes)
            if over_bytes and sized_plan is not None:
                self._does_not_fit(sized_plan, step.keys)
            self.unforeseen_bytes = min(self.unforeseen_bytes + over_bytes, budget_bytes // _MOST_UNFORESEEN)
            return budget_bytes, Over.DIFFERED
        if sized_plan is not None and not sized_plan.is_misfit:
            self._tables[kind].replaced = 0  # its steps are as planned again: what differed was a passing step
        is_own = executor is self._given or sized_plan is not None
        return budget_bytes, Over.MORE_THAN_PLANNED if is_own else Over.ANOTHER_PLAN

    def _does_not_fit(self, sized_plan: SizedPlan, keys: SaveKeys) -> None:
        """Called when a step differed from its sized plan and exceeded the budget. The next one gets another
        plan."""
        table, own = self._tables[keys.kind], self._own_kind
        if own is not None and keys.begin is not None and self._alike.set_apart(own, keys.begin, keys.saves):
            keys.kind = own
            sized_plan.misfit_steps = _RECORDED_MISFITS + 1
        elif table.may_replace:
            sized_plan.misfit_steps = _RECORDED_MISFITS + 1

    def executed(self, executor: Executor, peak_bytes: int, resident_bytes: int, kind: Kind) -> None:
        """Compare a finished step that followed a plan with the plan's budget. `resident_bytes` were allocated when it
        began."""
        sized_plan, maker = self._plan_of(executor, kind), self._maker
        if sized_plan is None or maker is None:
            return
        self._tables[kind].records_all |= executor.has_grown
        if not executor.differences and peak_bytes > maker.planner.budget_bytes(sized_plan.recording):
            maker.tighten(sized_plan, peak_bytes, resident_bytes)


def require_foreseen_fit(
    planner: BudgetPlanner, table: PlanTable, first: SaveKey, resident_bytes: int, earlier_bytes: int
) -> None:
    """Raises BudgetError if a step of the table's kind that begins with `first` is over the budget under every plan.
    `resident_bytes` are allocated as it begins, of which graphs of earlier steps hold `earlier_bytes`."""
    # If the first saves of steps do not show their sizes, no step is refused ahead.
    ends = None if table.records_all else table.recorded.ends
    if ends is None or not table.plans or any(sized_plan.serves(first) for sized_plan in table.plans):
        return
    # Memory that was allocated between the two recordings is not growth of the step.
    small, large = (with_resident(one, resident_bytes) for one in ends)
    estimate = lower_estimate(small, large, first)
    budget_bytes = planner.fixed_bytes(large.device_bytes)
    if estimate is None or budget_bytes is None:
        return
    try:
        require_feasible_budget(estimate, budget_bytes)
    except BudgetError as error:
        least_bytes, where = error.least_bytes, error.where
    else:
        return
    recorded = " and ".join(str(list(first_save(one).size)) for one in (small, large))
    foreseen = BudgetError(
        budget_bytes=budget_bytes,
        least_bytes=least_bytes,
        where=where,
        resident_bytes=resident_bytes,
        foreseen=f"The step has only begun: its first save is {list(first.size)}. The estimate is from recorded steps "
        f"with first saves of {recorded}; steps with up to {list(table.plans[-1].first.size)} have plans",
    )
    raise naming_earlier_graphs(foreseen, earlier_bytes) if earlier_bytes else foreseen
