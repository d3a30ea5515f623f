"""Decides how much of the state of a session's optimizers stays on the device: as much as makes the step shortest.

State that leaves makes each step wait for its copies. State that stays takes room from the activations, whose plan then
moves more. So once the plans of a session have settled, the step is predicted for several shares of the state that
stay, and the best of them is taken: its state stays from the next step of the optimizer on, and the plans are made for
the room that is left.

[Note: State leaves again] What stays was decided for the steps that were known. A step for whose size there is no plan
gets the room: all state leaves at once. Once the plans have settled with the new steps, it is decided again, a bounded
number of times. After a step that exceeded its budget all state leaves for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from vdnn.bytesize import format_bytes

logger = logging.getLogger("vdnn")
_PARTS = 4  # of the state that could stay, which are compared
_MOST_DECISIONS = 4


class PredictedSteps(Protocol):
    """The steps of a session, as far as it has plans for them."""

    @property
    def are_plans_settled(self) -> bool: ...
    @property
    def steps_over_budget(self) -> int: ...
    def predicted_ns(self, more_bytes: int) -> int | None:
        """The mean time of a step with this many more bytes resident. None if that does not fit."""

    def fits_with(self, more_bytes: int) -> bool: ...


class ManagedState(Protocol):
    """The state of one optimizer that a session manages."""

    def bytes_away(self) -> list[tuple[int, int]]:
        """Each parameter with state on the host: its id, and the bytes."""

    def crossed(self) -> tuple[int, int]:
        """The bytes of state and gradients that have crossed the link in all steps, and the time in ns that compute has
        waited for them: they cross it together."""

    def may_stay(self) -> bool: ...
    def take_out(self) -> None: ...


class StateRoom:
    """The state of the optimizers of one engine. `staying` are the ids of the parameters whose state stays."""

    def __init__(self, states: Callable[[], Sequence[ManagedState] | None]) -> None:
        """`states`: the optimizer states that sessions manage now, None once the engine is gone."""
        self.staying: set[int] = set()
        self.line = ""  # for the report
        self._states = states
        self._decisions = 0
        self._crossed: tuple[int, int] | None = None  # when an optimizer last stepped
        self._over_before = 0

    def holds(self, parameter: object) -> bool:
        """True if the state of `parameter` stays."""
        return id(parameter) in self.staying

    def stepped(self, steps: PredictedSteps) -> None:
        """Called after each step of an optimizer."""
        if self.staying and steps.steps_over_budget > self._over_before:
            self._decisions = _MOST_DECISIONS
            self.leave()
        if self._decisions >= _MOST_DECISIONS or self.staying:
            return
        states = self._states() or ()
        crossed = [state.crossed() for state in states]
        now = sum(nbytes for nbytes, _ in crossed), sum(waited_ns for _, waited_ns in crossed)
        before, self._crossed = self._crossed, now
        if before is None or now[0] <= before[0] or not steps.are_plans_settled:
            return
        self._decisions += 1
        if all(state.may_stay() for state in states):
            self._decide([one for state in states for one in state.bytes_away()], before, now, steps)

    def _decide(
        self,
        away: Collection[tuple[int, int]],
        before: tuple[int, int],
        now: tuple[int, int],
        steps: PredictedSteps,
    ) -> None:
        """The parameters that are stepped first keep their state: while they are, that of others comes."""
        waits = (now[1] - before[1]) / (now[0] - before[0])  # ns a byte
        whole = sum(nbytes for _, nbytes in away)

        def time_ns(kept: int) -> float | None:
            predicted = steps.predicted_ns(kept)  # with the waits of a step in which all state moves
            return None if predicted is None else predicted - waits * 2 * kept

        fitting = whole if steps.fits_with(whole) else _most(lambda kept: steps.fits_with(kept), whole)
        shares = sorted({_up_to(away, fitting * part // _PARTS)[1] for part in range(_PARTS + 1)})
        times = {kept: found for kept in shares if (found := time_ns(kept)) is not None}
        if 0 not in times:
            return
        best = min(times, key=lambda kept: (times[kept], kept))
        self.staying, _ = _up_to(away, best)
        if not self.staying:
            return
        self._over_before = steps.steps_over_budget
        self.line = (
            f"  {format_bytes(best)} of the optimizers' state stay on the device: a step is predicted to take "
            f"{times[best] / 1e6:.2f} ms, and {times[0] / 1e6:.2f} ms if all of it left"
        )

    def leave(self) -> int:
        """All state leaves the device, until it is decided again. Returns the bytes that it had there."""
        if not self.staying:
            return 0
        self._crossed = None
        self.staying = set()
        self.line = "  all of the optimizers' state leaves the device again: a step needed the room"
        logger.info("vdnn:%s", self.line)
        states = self._states() or ()
        before = sum(nbytes for state in states for _, nbytes in state.bytes_away())
        for state in states:
            state.take_out()
        return sum(nbytes for state in states for _, nbytes in state.bytes_away()) - before


def _up_to(away: Iterable[tuple[int, int]], limit_bytes: int) -> tuple[set[int], int]:
    """The first parameters whose state together has at most this many bytes, and its bytes."""
    found, total = set(), 0
    for identity, nbytes in away:
        if total + nbytes <= limit_bytes:
            found.add(identity)
            total += nbytes
    return found, total


def _most(fits: Callable[[int], bool], whole: int) -> int:
    """The most bytes that fit, to a hundredth of `whole`."""
    low, high = 0, whole
    while high - low > max(1, whole // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
