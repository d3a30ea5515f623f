"""A session takes its first plans quickly. A deep search goes on beside the training, and a better plan of it is taken
over between two steps.

Virtual machines wait for their plans, since a step in virtual time would not know when a search ends. Here they do not.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vdnn
from tests.runtime.rigs.stored_trainings import TRAININGS, plain
from tests.runtime.rigs.stored_trainings import trained as trained_in
from vdnn import _C
from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.planned_step import PlannedStep, plan_step
from vdnn.planning.search.auto import Auto
from vdnn.planning.search.effort import DEEP, Effort
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session import offload
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps import better_plans, planner
from vdnn.runtime.steps.better_plans import BetterPlans
from vdnn.runtime.steps.plan_table import SizedPlan
from vdnn.user_warnings import VdnnWarning

# Two evaluations for each of 14 choices of recomputes, and no finalist: its plan only moves.
_POOR = Effort(moves=0.0, trials=0.0, moves_a_trial=2, finalists=0)
_NAMES = ["gpt-2", "llama"]


@pytest.fixture(autouse=True)
def _searches_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "searches_beside", lambda planner: True)
    monkeypatch.setattr(offload, "make_quick_planner", lambda policy: Auto(_POOR))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {name: plain(TRAININGS[name]) for name in _NAMES}


def better_of(session: Session) -> BetterPlans:
    maker = session._engine.steps._plans._maker  # type: ignore[union-attr]
    assert maker is not None
    assert maker.better is not None
    return maker.better


class Taken:
    """Collects what sessions took over: the sized plan, its slowdown before, and the better plan."""

    def __init__(self) -> None:
        self.pairs: list[tuple[SizedPlan, float, PlannedStep]] = []


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """Each step begins when the search beside it has ended."""
    found, better = Taken(), BetterPlans.better

    def awaited(self: BetterPlans) -> tuple[SizedPlan, PlannedStep] | None:
        self.wait()
        pair = better(self)
        if pair is not None:
            found.pairs.append((pair[0], pair[0].slowdown, pair[1]))
        return pair

    monkeypatch.setattr(BetterPlans, "better", awaited)
    return found


def trained(name: str, alone: dict[str, Any], **options: Any) -> tuple[Any, Session, int]:
    """A run under a budget, in which every step ends before a search beside it is looked at."""
    budget_bytes = int(TRAININGS[name].share * max(alone[name].peaks))
    with VirtualMachine("h100", fake=False) as machine:
        session = vdnn.offload(budget=budget_bytes, device=machine, min_bytes=256, **options)
        with session:
            ran = trained_in(TRAININGS[name], machine, session, [])
    return ran, session, budget_bytes


def searching_threads() -> int:
    return sum((task / "comm").read_text() == "vdnn search\n" for task in Path("/proc/self/task").iterdir())


@pytest.mark.parametrize("name", _NAMES)
def test_a_better_plan_is_taken_over_between_steps(
    name: str, alone: dict[str, Any], taken: Taken, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="vdnn"):
        ran, session, budget_bytes = trained(name, alone)
    assert taken.pairs
    sized_plan, slowdown, planned = taken.pairs[-1]
    assert 1 < planned.slowdown < slowdown
    assert session.plan == planned.plan
    assert sized_plan.slowdown == planned.slowdown
    assert "a better plan was found beside the training" in caplog.text
    assert ran.numbers == alone[name].numbers, "losses and gradients are those of plain"
    assert max(ran.peaks[2:]) <= budget_bytes


def test_it_is_the_plan_of_a_deep_search(alone: dict[str, Any], taken: Taken) -> None:
    trained("llama", alone)
    assert taken.pairs
    for sized_plan, _, planned in taken.pairs:
        budget_bytes = planned.plan.budget_bytes
        deep = plan_step(sized_plan.recording, profile_costs(load_profile("h100")), budget_bytes, Auto(DEEP))
        assert planned.plan == deep.plan


def test_the_same_training_takes_over_the_same_plans(alone: dict[str, Any], taken: Taken) -> None:
    for _ in range(2):
        trained("gpt-2", alone)
    half = len(taken.pairs) // 2
    assert half
    plans = [planned.plan for _, _, planned in taken.pairs]
    assert plans[:half] == plans[half:]


def test_better_plans_are_stored(alone: dict[str, Any], taken: Taken, tmp_path: Path) -> None:
    _, first, _ = trained("gpt-2", alone, plans=tmp_path)
    assert taken.pairs
    taken.pairs.clear()
    _, second, _ = trained("gpt-2", alone, plans=tmp_path)
    assert second.plan == first.plan
    assert not taken.pairs, "what an earlier run has searched for is not searched for again"


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(better_plans, "DEEP", Effort(1e9, 1e9, 10**9, 10**9, 3))


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("error", [None, KeyboardInterrupt, RuntimeError])
def test_leaving_the_session_ends_the_search(alone: dict[str, Any], error: type[BaseException] | None) -> None:
    during = []
    with VirtualMachine("h100", fake=False) as machine:
        session = vdnn.offload(budget=int(0.5 * max(alone["gpt-2"].peaks)), device=machine, min_bytes=256)
        with contextlib.nullcontext() if error is None else pytest.raises(error), session:
            trained_in(TRAININGS["gpt-2"], machine, session, [])
            during = [len(better_of(session)._running), searching_threads()]
            if error is not None:
                raise error
    assert during == [1, 1]
    assert better_of(session)._running == []
    assert searching_threads() == 0


@pytest.mark.usefixtures("endless")
def test_a_search_that_is_cancelled_again_and_again_is_given_up(alone: dict[str, Any]) -> None:
    """A session that is entered in each step never lets it end."""
    running = []
    with VirtualMachine("h100", fake=False) as machine:
        session = vdnn.offload(budget=int(0.5 * max(alone["gpt-2"].peaks)), device=machine, min_bytes=256)
        training = TRAININGS["gpt-2"]._replace(batches=(32, 32))
        for _ in range(6):
            with session:
                trained_in(training, machine, session, [])
                running.append(len(better_of(session)._running))
    assert sum(running) <= better_plans._MOST_STARTS
    assert running[0] == 1


def raises(*_: object) -> Any:
    raise OSError("no more threads")


class Failed:
    """A search whose thread has ended with an error."""

    is_done = True

    def __init__(self, search: object) -> None:
        pass

    def wait_for(self, seconds: float) -> bool:
        return True

    def cancel(self) -> None:
        pass

    @property
    def found(self) -> Any:
        raise MemoryError("bad_alloc")


@pytest.mark.parametrize(("search", "message"), [(raises, "no more threads"), (Failed, "bad_alloc")])
def test_an_error_in_the_thread_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, alone: dict[str, Any], search: Callable[..., Any], message: str
) -> None:
    monkeypatch.setattr(_C, "BackgroundSearch", search)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ran, _, _ = trained("gpt-2", alone)
    told = [str(one.message) for one in caught if one.category is VdnnWarning]
    assert len(told) == 1, told
    assert message in told[0]
    assert ran.numbers == alone["gpt-2"].numbers
