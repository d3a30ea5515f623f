"""What hooks cost, loosely: targets are printed by `make bench`; here a cost that has doubled is caught."""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch

from benchmarks.core import hook_cost, peer_hooks
from benchmarks.core.hook_cost import KEPT, NO_OP, OFFLOADED, STILL_THERE, TARGETS, HookCosts, measure, render
from benchmarks.core.peer_hooks import open_peers
from benchmarks.progress import Progress

ROUNDS = 8


@pytest.fixture(scope="module")
def costs() -> HookCosts:
    return measure(ROUNDS, Progress("test", ROUNDS, stream=io.StringIO()))


def no_ops(costs: HookCosts, way: str) -> float:
    return next(row.no_ops for row in costs.rows if row.way == way)


@pytest.mark.parametrize(("way", "at_most"), [(KEPT, 6.0), (OFFLOADED, 60.0)])
def test_a_save_costs_a_bounded_number_of_no_ops(costs: HookCosts, way: str, at_most: float) -> None:
    assert no_ops(costs, NO_OP) == 1
    assert no_ops(costs, way) <= at_most, render(costs)


def test_what_comes_back_costs_more_than_what_has_not_gone(costs: HookCosts) -> None:
    assert no_ops(costs, OFFLOADED) > no_ops(costs, STILL_THERE)


def test_the_table_says_what_was_aimed_at_and_who_did_not_run(costs: HookCosts) -> None:
    table = render(costs)
    for way, target in TARGETS.items():
        line = next(line for line in table.splitlines() if line.startswith(way))
        assert line.split()[-2:] == [f"{target:.0f}", "yes" if no_ops(costs, way) <= target else "NO"]
    for absent in costs.absent:
        assert f"{absent.name}: not run, " in table.replace("\n", " ")


def test_a_figure_without_an_offload_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_cost, "LARGER_THAN_A_SAVE", 0)
    with pytest.raises(RuntimeError, match=r"expected offloads \(0, 1999, 1999\) of 2000 saves each, got \(1999, "):
        measure(1, Progress("test", 1, stream=io.StringIO()))


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
