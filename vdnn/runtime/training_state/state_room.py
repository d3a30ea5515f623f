"""Decides how much of a session's training state stays on the device: as much as makes the step shortest.

State that leaves crosses the link: parameters ahead of each use and around the step of the optimizer, gradients and
optimizer state around that step. State that stays takes room from the activations, whose plan then moves more. So once
the plans of a session have settled, its step is predicted for several shares that stay, and the best of them is taken
from the next step on. Parameters come first, because a byte of them crosses the link most often; then gradients, then
state.

[Note: State leaves again] What stays was decided for the steps that were known. A step for whose size there is no plan
gets the room: everything leaves at once. Once the plans have settled with the new steps, it is decided again, a bounded
number of times. After a step that exceeded its budget everything leaves for good. Both hold for the state that was
there then: where a session begins with state that is new, and nothing else stays, it is decided for that.

[Note: Steps are recorded anew] State that stays is there as a step begins, which its plan counts. A gradient that stays
is made in the middle of a step, and the copies of parameters that stay are made no more: so once these stay or leave
again, steps are recorded and planned anew. A plan folder has plans for steps from which all of these leave, which is
how the next run begins: with one, only state stays.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from vdnn.bytesize import format_bytes

logger = logging.getLogger("vdnn")
_PARTS = 4  # of what could stay of each kind, which are compared
_MOST_DECISIONS = 4
# Plans are made before a step is recorded with what stays. They leave this part of it free, and the window of gradients
# that are being copied: a backward that waits for fewer parameters makes them faster.
_MARGIN = 16
_LEAST_GAIN = 0.05  # of a step, for which steps are recorded anew: near the least budget it is all in a guess


class StateKind(Enum):
    """The kinds of training state, in the order in which they stay. The value is their name in the report."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    STATE = "the optimizers' state"


class PredictedSteps(Protocol):
    """The steps of a session, as far as it has plans for them."""

    @property
    def are_plans_settled(self) -> bool: ...
    @property
    def steps_over_budget(self) -> int: ...
    @property
    def stores_plans(self) -> bool: ...
    def predicted_ns(self, more_bytes: int) -> int | None:
        """The mean time of a step with this many more bytes resident. None if that does not fit."""

    def fits_with(self, more_bytes: int) -> bool: ...
    def record_anew(self, more_bytes: int) -> None:
        """Plans serve until steps with other training state are recorded. The next one takes this many bytes more."""

    def leave_room_for(self, unrecorded_bytes: int) -> None: ...


class StayingGradients(Protocol):
    """The gradients of one optimizer's parameters."""

    def bytes_away(self) -> list[tuple[int, int]]:
        """Each parameter whose gradient leaves: its id, and the bytes."""

    def window_bytes(self) -> int: ...
    def take_out(self) -> None: ...


class ManagedState(Protocol):
    """The state of one optimizer that a session manages."""

    @property
    def gradients(self) -> StayingGradients: ...
    def bytes_away(self) -> list[tuple[int, int]]:
        """Each parameter with state on the host: its id, and the bytes."""

    def crossed(self) -> tuple[int, int]:
        """The bytes of state, gradients and stepped parameters that have crossed the link in all steps, and the time in
        ns that compute has waited for them: they cross it together."""

    def may_stay(self) -> bool: ...
    def take_out(self) -> None: ...


class StayingParameters(Protocol):
    """The parameters of one model that a session manages."""

    def bytes_away(self) -> list[tuple[int, int]]:
        """Each parameter on the host that could stay on the device: its id, and the bytes."""

    def fetched(self) -> tuple[int, int]:
        """The bytes that calls and backwards have fetched, and the time in ns that compute has waited for them."""

    def ahead_bytes(self) -> int: ...
    def time_waits(self, *, are_timed: bool) -> None: ...
    def keep(self, chosen: Container[int]) -> None: ...
    def take_out(self) -> None: ...


class _MovedSoFar(NamedTuple):
    """The bytes that have moved in all steps so far, and the time in ns that compute has waited for them."""

    crossed_bytes: int  # around steps of optimizers
    crossed_ns: int
    fetched_bytes: int  # for calls and backwards
    fetched_ns: int


class _Share(NamedTuple):
    """A share of the training state that could stay: the ids of parameters of each kind, and the bytes."""

    staying: dict[StateKind, set[int]]
    nbytes: dict[StateKind, int]

    @property
    def total(self) -> int:
        return sum(self.nbytes.values())

    @property
    def needs_recording(self) -> bool:
        """See [Note: Steps are recorded anew]."""
        return bool(self.nbytes[StateKind.PARAMETERS] or self.nbytes[StateKind.GRADIENTS])


class StateRoom:
    """The training state of the sessions of one engine."""

    def __init__(
        self,
        states: Callable[[], Sequence[ManagedState] | None],
        parameters: Callable[[], Sequence[StayingParameters] | None] = lambda: (),
    ) -> None:
        """Both tell who sessions manage now; None once the engine is freed."""
        self.staying: dict[StateKind, set[int]] = {kind: set() for kind in StateKind}
        self.lines: list[str] = []  # for the report
        self.predicted_ns: int | None = None  # of a step with what stays, if it was decided here
        self._states = states
        self._parameters = parameters
        self._decisions = 0
        self._counts: _MovedSoFar | None = None  # when an optimizer last stepped
        self._over_before = 0
        self._window_bytes = 0
        self._steps: Callable[[], PredictedSteps | None] = lambda: None  # for which it was decided
        self._planned_with = False  # plans are of steps in which parameters or gradients stay
        self._is_recorded_anew = False  # the next step is, with all that stays
        self._is_followed = False  # what stays was given, and plans have not settled since

    def holds_state(self, parameter: object) -> bool:
        """True if the state of `parameter` stays."""
        return id(parameter) in self.staying[StateKind.STATE]

    def holds_gradient(self, parameter: object) -> bool:
        return id(parameter) in self.staying[StateKind.GRADIENTS]

    @property
    def _is_held(self) -> bool:
        return any(self.staying.values())

    def stepped(self, steps: PredictedSteps) -> None:
        """Called after each step of an optimizer."""
        self._is_followed = self._is_followed and not steps.are_plans_settled
        if self._is_followed:
            self._over_before, self._steps = steps.steps_over_budget, weakref.ref(steps)
        self._is_recorded_anew = self._is_followed
        if self._is_held and steps.steps_over_budget > self._over_before:
            self._decisions = _MOST_DECISIONS
            self.leave()
        if self._planned_with and not self._is_held:
            self._planned_with = False
            self._leave_room_for_copies(steps)
            steps.record_anew(0)
        if self._decisions >= _MOST_DECISIONS or self._is_held:
            return
        states, parameters = self._states() or (), self._parameters() or ()
        now, before = _counts_of(states, parameters), self._counts
        self._counts = now
        for one in parameters:
            one.time_waits(are_timed=True)
        has_moved = before is not None and (now.crossed_bytes, now.fetched_bytes) > before[::2]
        if before is None or not has_moved or not steps.are_plans_settled:
            return
        self._decisions += 1
        if all(state.may_stay() for state in states):
            self._decide(states, parameters, before, now, steps)

    def follow(self, staying: dict[StateKind, set[int]]) -> None:
        """Keeps the parameters with these ids, and the gradients and states of such, as it was decided before. Called
        before anything leaves. Steps have no plans yet, and are recorded with what stays."""
        self.staying = {kind: set(staying[kind]) for kind in StateKind}
        self._decisions = _MOST_DECISIONS
        self._is_followed = self._is_recorded_anew = self._is_held
        self._planned_with = bool(staying[StateKind.PARAMETERS] or staying[StateKind.GRADIENTS])

    def _decide(
        self,
        states: Sequence[ManagedState],
        parameters: Sequence[StayingParameters],
        before: _MovedSoFar,
        now: _MovedSoFar,
        steps: PredictedSteps,
    ) -> None:
        crossing = _rate(now.crossed_bytes - before.crossed_bytes, now.crossed_ns - before.crossed_ns)
        fetching = _rate(now.fetched_bytes - before.fetched_bytes, now.fetched_ns - before.fetched_ns)
        away = {kind: list[tuple[int, int]]() for kind in StateKind}
        away[StateKind.STATE] = [one for state in states for one in state.bytes_away()]
        if not steps.stores_plans:
            away[StateKind.GRADIENTS] = [one for state in states for one in state.gradients.bytes_away()]
            away[StateKind.PARAMETERS] = [one for model in parameters for one in model.bytes_away()]
        stepped = {identity for identity, _ in away[StateKind.GRADIENTS]}

        def saved_ns(share: _Share) -> float:
            """The waits that a step has without what stays of this share."""
            crossed = share.nbytes[StateKind.STATE] + share.nbytes[StateKind.GRADIENTS]
            crossed += sum(
                nbytes
                for one, nbytes in away[StateKind.PARAMETERS]
                if one in share.staying[StateKind.PARAMETERS] & stepped
            )
            return 2 * (crossing * crossed + fetching * share.nbytes[StateKind.PARAMETERS])

        times: list[tuple[float, int, _Share]] = []
        self._window_bytes = sum(state.gradients.window_bytes() for state in states)
        for share in _shares(away, lambda nbytes: steps.fits_with(nbytes + self._margin_bytes(nbytes))):
            predicted = steps.predicted_ns(share.total)  # with the waits of a step in which everything moves
            if predicted is not None:
                times.append((predicted - saved_ns(share), share.total, share))
        if not times or times[0][1]:
            return
        all_away_ns = times[0][0]
        worthwhile = [one for one in times if not one[2].needs_recording or one[0] < (1 - _LEAST_GAIN) * all_away_ns]
        best_ns, total, best = min(worthwhile, key=lambda one: one[:2])
        if not total:
            return
        self._over_before = steps.steps_over_budget
        self._take(best, parameters, steps)
        self.predicted_ns = round(best_ns)
        kinds = ", ".join(
            f"{format_bytes(best.nbytes[kind])} of {kind.value}" for kind in StateKind if best.nbytes[kind]
        )
        self.lines = [
            f"  {kinds} stay on the device: a step is predicted to take {best_ns / 1e6:.2f} ms, and "
            f"{all_away_ns / 1e6:.2f} ms if all of it left"
        ]

    def _take(self, share: _Share, parameters: Sequence[StayingParameters], steps: PredictedSteps) -> None:
        self.staying, self._steps = share.staying, weakref.ref(steps)
        for one in parameters:
            one.time_waits(are_timed=False)
            one.keep(share.staying[StateKind.PARAMETERS])
        if share.needs_recording:
            self._planned_with = self._is_recorded_anew = True
            self._leave_room_for_copies(steps)
            steps.record_anew(share.nbytes[StateKind.GRADIENTS] + self._margin_bytes(share.total))

    def _margin_bytes(self, staying_bytes: int) -> int:
        return staying_bytes // _MARGIN + self._window_bytes

    def _leave_room_for_copies(self, steps: PredictedSteps) -> None:
        ahead_bytes = sum(one.ahead_bytes() for one in self._parameters() or ())
        leaving = [state.gradients for state in self._states() or () if state.gradients.bytes_away()]
        steps.leave_room_for(ahead_bytes + sum(one.window_bytes() for one in leaving))

    def leave(self) -> int:
        """Everything leaves the device, until it is decided again. Returns the bytes of state that it had there."""
        if not self._is_held or self._is_recorded_anew:
            return 0
        self._counts = self.predicted_ns = None
        self.staying = {kind: set() for kind in StateKind}
        self.lines = ["  all of the training state leaves the device again: a step needed the room"]
        logger.info("vdnn:%s", self.lines[0])
        states = self._states() or ()
        before = sum(nbytes for state in states for _, nbytes in state.bytes_away())
        for state in states:
            state.take_out()
            state.gradients.take_out()
        for one in self._parameters() or ():
            one.take_out()
        steps = self._steps()
        if self._planned_with and steps is not None:
            self._leave_room_for_copies(steps)  # the running step has them, and may be planned yet
        return sum(nbytes for state in states for _, nbytes in state.bytes_away()) - before

    def forget_all_but(self, there: Collection[int]) -> None:
        """Forgets what stays of parameters that are gone: all but the ids `there`. If nothing else stays, it is decided
        again."""
        if self._is_held:
            self.staying = {kind: ids & frozenset(there) for kind, ids in self.staying.items()}
        if not self._is_held:
            self._decisions, self._counts, self.lines = 0, None, []

    def begin_anew(self, steps: PredictedSteps) -> None:
        """More of the training state is managed from now on. Nothing stays until it is decided again."""
        self._is_recorded_anew = self._planned_with = self._is_followed = False
        self.leave()
        self.lines, self._decisions, self._counts = [], 0, None
        steps.leave_room_for(sum(one.ahead_bytes() for one in self._parameters() or ()))


def _counts_of(states: Iterable[ManagedState], parameters: Iterable[StayingParameters]) -> _MovedSoFar:
    crossed, fetched = [state.crossed() for state in states], [one.fetched() for one in parameters]
    return _MovedSoFar(
        sum(nbytes for nbytes, _ in crossed),
        sum(waited_ns for _, waited_ns in crossed),
        sum(nbytes for nbytes, _ in fetched),
        sum(waited_ns for _, waited_ns in fetched),
    )


def _rate(nbytes: int, waited_ns: int) -> float:
    """The ns that compute waited for each byte."""
    return waited_ns / nbytes if nbytes else 0.0


def _shares(away: dict[StateKind, list[tuple[int, int]]], fits: Callable[[int], bool]) -> list[_Share]:
    """Shares that could stay, beginning with nothing: more and more of each kind, and then of the next one. Shares of
    state alone follow: nothing is recorded anew for those, so a small gain is enough."""
    whole = sum(nbytes for several in away.values() for _, nbytes in several)
    fitting = _most(fits, whole)
    nothing = _Share({kind: set() for kind in StateKind}, dict.fromkeys(StateKind, 0))
    shares = [nothing]
    for kind in StateKind:
        shares += _more_of(kind, shares[-1], away, fitting)
    return shares if not shares[-1].needs_recording else shares + _more_of(StateKind.STATE, nothing, away, fitting)


def _more_of(
    kind: StateKind, below: _Share, away: dict[StateKind, list[tuple[int, int]]], fitting: int
) -> list[_Share]:
    """Shares with more and more of this kind than one that has none of it."""
    # State that is stepped first stays: meanwhile that of others comes. Layers that are used one after another stay in
    # turn, so that the link has the time of those that stay for the others.
    choose = _up_to if kind is StateKind.STATE else _in_turn
    limit = min(fitting - below.total, sum(nbytes for _, nbytes in away[kind]))
    found: list[_Share] = []
    for part in range(1, _PARTS + 1):
        chosen, nbytes = choose(away[kind], limit * part // _PARTS)
        if nbytes > (found[-1] if found else below).nbytes[kind]:
            found.append(_Share({**below.staying, kind: chosen}, {**below.nbytes, kind: nbytes}))
    return found


def _up_to(away: Iterable[tuple[int, int]], limit_bytes: int) -> tuple[set[int], int]:
    """The first parameters which together have at most this many bytes, and these bytes."""
    found, total = set(), 0
    for identity, nbytes in away:
        if total + nbytes <= limit_bytes:
            found.add(identity)
            total += nbytes
    return found, total


def _in_turn(away: Collection[tuple[int, int]], limit_bytes: int) -> tuple[set[int], int]:
    """Parameters which together have at most this many bytes, evenly spread over all, and these bytes."""
    whole = sum(nbytes for _, nbytes in away)
    found, total, seen = set(), 0, 0
    for identity, nbytes in away:
        seen += nbytes
        if (total + nbytes) * whole <= limit_bytes * seen:
            found.add(identity)
            total += nbytes
    return found, total


def _most(fits: Callable[[int], bool], whole: int) -> int:
    """The most bytes that fit: `whole`, or to a hundredth of it."""
    if fits(whole):
        return whole
    low, high = 0, whole
    while high - low > max(1, whole // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
