"""A session on a checked, poisoning, simulated device, with windows so small that everything is offloaded
and reloaded.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tests.conftest import SCHEDULES
from tests.runtime.identity.outcome import Outcome, differences
from tests.runtime.identity.runs import NUDGE_SAVES, Mode, nudge, run_call
from vdnn import _C
from vdnn.runtime.session.limits import Limits
from vdnn.runtime.session.offload import offload
from vdnn.runtime.storage.counters import Counters, Kept
from vdnn.user_warnings import VdnnWarning

# Reasons of empty tensors, and of tensors whose bytes are not in one storage.
NOTHING_TO_MOVE = frozenset({Kept.SMALL, Kept.SUBCLASS})
_SHOWN = 50


class IdentityRig:
    """Compares runs in its session with plain runs, and collects failures by name."""

    def __init__(self, schedule: _C.Schedule, seed: int = 0, policy: str = "vdnn-all") -> None:
        self._device = _C.OrderingChecker(_C.SimDevice(schedule=schedule, seed=seed), _C.OnViolation.COLLECT)
        self._schedule = schedule.name.lower()
        self._session = offload(
            policy,
            device=self._device,  # type: ignore[arg-type]  # a native device stands for the CPU's tensors
            min_bytes=0,
            limits=Limits(offload_window=1, reload_window=4096),
        )
        self.counters: Counters = self._session.counters
        self.compared = 0
        self.saved_nothing: list[str] = []
        self.offloaded_nothing: list[str] = []  # names of runs that saved something
        self.failures: list[str] = []
        self.checked_accesses = 0
        self.report = ""

    def compare(self, name: str, run: Callable[[], Outcome], *, may_stay: frozenset[Kept] | None = None) -> None:
        """Compares two plain runs with each other, and then with one run in the session.

        With `may_stay`, a reload must have served every use of a save, except of saves that were kept for one of these
        reasons. This holds unless others hold the tensors that the call gets, or the call saves while backward runs.
        """
        plain, again = run(), run()
        unreproducible = differences(plain, again)
        if unreproducible:
            self._fail(name, "two plain runs differ", unreproducible)
            return
        with self._session:
            pending = nudge()  # issues the remaining copies of the previous run, and leaves one save of its own
            before = copy.deepcopy(self.counters)
            offloaded = run()
            offloaded.nudges.append(nudge())
        del pending
        self.compared += 1
        self._fail(name, "not as in a plain run", differences(plain, offloaded))
        self._fail(name, "ordering", [violation.missing for violation in self._device.take_violations()])
        accounts = _accounts(before, self.counters, NUDGE_SAVES * len(offloaded.nudges))
        if not accounts.saves:
            self.saved_nothing.append(name)
        elif not accounts.offloaded:
            self.offloaded_nothing.append(name)
        if may_stay is not None:
            self._fail(name, "not every save left and came back", accounts.complaints(may_stay))

    def close(self) -> None:
        self.checked_accesses = self._device.checked_accesses
        self.report = f"{self._session.report()}\n  checked {self.checked_accesses} accesses"
        self._session.close()
        self._fail("closing", "ordering", [violation.missing for violation in self._device.take_violations()])

    def _fail(self, name: str, what: str, lines: list[str]) -> None:
        self.failures += [f"{name} ({self._schedule}): {what}: {line}" for line in lines]


@dataclass(frozen=True, slots=True)
class _Accounts:
    """How many saves of one call were offloaded, kept, or used without a reload."""

    saves: int
    offloaded: int
    kept: Counter[Kept]
    used_in_place: int

    def complaints(self, may_stay: frozenset[Kept]) -> list[str]:
        lines = [f"stayed: {reason.value}" for reason in self.kept if reason not in may_stay]
        if self.used_in_place:
            lines.append(f"{self.used_in_place} uses without a reload")
        return lines


def _accounts(before: Counters, after: Counters, nudges: int) -> _Accounts:
    """Leaves out the saves of nudges. The last save of a nudge is issued by the next nudge, so the two cancel out."""
    return _Accounts(
        saves=after.saves - before.saves - nudges,
        offloaded=after.storages - before.storages - nudges,
        kept=after.kept - before.kept,
        used_in_place=after.used_in_place - before.used_in_place,
    )


@contextmanager
def identity_rigs(
    seed: int, record: Callable[[str, object], None], policy: str = "vdnn-all"
) -> Iterator[list[IdentityRig]]:
    """One rig per schedule, closed afterwards. Then checks that nothing failed, and that something was compared at all.

    A few samples may need no reload by chance. So each rig first compares a call that needs one, which shows that the
    rig can move bytes both ways; the complaints about each later call show that it did.

    `record` gets the figures. It is pytest's record_property: --junit-xml shows them.
    """
    rigs = [IdentityRig(schedule, seed, policy) for schedule in SCHEDULES]
    try:
        with _quiet():
            for rig in rigs:
                rig.compare("the control", _control, may_stay=NOTHING_TO_MOVE)
            yield rigs
    finally:
        for rig in rigs:
            rig.close()
    for figure in ("compared", "saved_nothing", "offloaded_nothing"):
        record(figure, [getattr(rig, figure) for rig in rigs])
    for rig in rigs:
        record("report", rig.report)
    failures = [failure for rig in rigs for failure in rig.failures]
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:_SHOWN])
    for rig in rigs:
        assert rig.counters.reloads, "nothing came back, not even of the control"
        assert rig.counters.freed_bytes, "nothing left the device, not even of the control"
        assert rig.checked_accesses, "nobody checked the order of accesses"


def _control() -> Outcome:
    """Saves its input, which nobody else holds, and uses it."""
    return run_call(torch.square, ((torch.linspace(0.1, 1.7, 24, requires_grad=True),), {}), Mode.ONCE)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the session's warning that nothing was offloaded: many operations save nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VdnnWarning)
        yield
