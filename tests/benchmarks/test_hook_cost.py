"""The cost of hooks in function calls. `make bench-core` measures their time; a test can bound the number of calls."""

from __future__ import annotations

import io
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.core import hook_cost, peer_hooks
from benchmarks.core.hook_cost import (
    KEPT,
    KEPT_SETTLED,
    NO_OP,
    OFFLOADED,
    OFFLOADED_SETTLED,
    PLAIN,
    SAVES,
    STILL_ON_DEVICE,
    TARGETS,
    HookCosts,
    costs_of,
    measure,
    medians_of,
    render,
    settled_multiples,
)
from benchmarks.core.peer_hooks import open_peers
from benchmarks.progress import Progress
from tests.patience import run_to_its_end

ROOT = Path(__file__).resolve().parents[2]

# Made-up times of the kinds of hooks: 1 us for each save without hooks, 2 us with hooks that do nothing.
MADE_UP_NS = {
    PLAIN: 1_000 * SAVES,
    NO_OP: 2_000 * SAVES,
    KEPT: 3_500 * SAVES,
    STILL_ON_DEVICE: 9_000 * SAVES,
    OFFLOADED: 22_000 * SAVES,
}


@pytest.fixture(scope="module")
def calls() -> dict[str, float]:
    """Counted in a process of its own: what earlier tests did here must not count."""
    counter = [sys.executable, "-m", "tests.benchmarks.count_hook_calls"]
    found = run_to_its_end(counter, cwd=ROOT, check=True)
    counted: dict[str, float] = json.loads(found.stdout)
    return counted


@pytest.mark.slow
def test_hooks_that_do_nothing_are_two_calls(calls: dict[str, float]) -> None:
    assert calls[NO_OP] - calls[PLAIN] == pytest.approx(2, abs=0.01)


# In the first step, which is observed. Those that repeat it run no Python: tests/runtime/steps/test_repeated_steps.py.
@pytest.mark.slow
@pytest.mark.parametrize(("way", "at_most"), [(KEPT, 10), (STILL_ON_DEVICE, 160), (OFFLOADED, 190)])
def test_a_save_and_its_use_take_a_bounded_number_of_calls(calls: dict[str, float], way: str, at_most: int) -> None:
    assert calls[way] - calls[PLAIN] <= at_most


@pytest.mark.slow
def test_what_comes_back_takes_more_calls_than_what_has_not_gone(calls: dict[str, float]) -> None:
    assert calls[OFFLOADED] > calls[STILL_ON_DEVICE] > calls[KEPT]


def no_ops(costs: HookCosts, way: str) -> float | None:
    return next(row.no_ops for row in costs.rows if row.way == way)


def test_the_table_says_what_was_aimed_at_and_who_did_not_run() -> None:
    _, absent = open_peers(torch.device("cpu"))
    costs = costs_of(MADE_UP_NS, absent)
    assert [no_ops(costs, way) for way in (NO_OP, KEPT, STILL_ON_DEVICE, OFFLOADED)] == [1, 2.5, 8, 21]
    table = render(costs)
    assert set(TARGETS) == {KEPT, OFFLOADED, KEPT_SETTLED, OFFLOADED_SETTLED}
    for way, target, met in ((KEPT, 3, "yes"), (OFFLOADED, 20, "NO")):
        line = next(line for line in table.splitlines() if line.startswith(way))
        assert line.split()[-2:] == [str(target), met]
    assert absent
    for one in absent:
        assert f"{one.name}: not run, " in table.replace("\n", " ")


def test_nothing_is_a_multiple_of_hooks_that_took_no_time() -> None:
    costs = costs_of({**MADE_UP_NS, NO_OP: MADE_UP_NS[PLAIN]}, ())
    assert [no_ops(costs, way) for way in (NO_OP, KEPT)] == [None, None]
    assert "too busy" in render(costs)


@pytest.mark.slow
def test_every_way_is_measured() -> None:
    rounds = 1
    costs = measure(rounds, rounds, Progress("test", rounds, stream=io.StringIO()))
    assert costs.plain_ns > 0
    assert {NO_OP, KEPT, STILL_ON_DEVICE, OFFLOADED} <= {row.way for row in costs.rows}
    multiples = settled_multiples(costs)
    assert list(multiples) == ["kept_settled", "offloaded_settled"]


def test_each_figure_is_the_median_of_the_repetitions() -> None:
    repeated = [costs_of({**MADE_UP_NS, KEPT: kept_ns * SAVES}, ()) for kept_ns in (3_000, 9_000, 4_000)]
    assert no_ops(medians_of(repeated), KEPT) == 3


@pytest.mark.slow
def test_a_figure_without_an_offload_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_cost, "LARGER_THAN_A_SAVE", 0)
    with pytest.raises(RuntimeError, match=r"expected offloads \(0, 1999, 1999\) of 2000 saves each, got \(1999, "):
        measure(1, 1, Progress("test", 1, stream=io.StringIO()))


# Peers.


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("trl", "torchtune"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("no_peers")
def test_a_peer_that_is_not_installed_says_so() -> None:
    opened, absent = open_peers(torch.device("cpu"))
    assert not opened
    assert [str(one).split(":")[:2] for one in absent] == [
        ["TRL's OffloadActivations", " not run, ModuleNotFoundError"],
        ["torchtune's OffloadActivations", " not run, ModuleNotFoundError"],
    ]


def test_a_peer_is_opened_where_it_offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = ModuleType("torchtune.training")
    monkeypatch.setattr(peer, "OffloadActivations", lambda min_offload_size: nullcontext(), raising=False)
    monkeypatch.setitem(sys.modules, "torchtune.training", peer)
    monkeypatch.setattr(peer_hooks, "PEERS", {"torchtune": peer_hooks.PEERS["torchtune's OffloadActivations"]})
    opened, absent = open_peers(torch.device("cuda"))
    assert list(opened) == ["torchtune"]
    assert not absent
    opened, absent = open_peers(torch.device("cpu"))
    assert not opened
    assert str(absent[0]) == "torchtune: not run, it offloads no tensors that are on the CPU."
