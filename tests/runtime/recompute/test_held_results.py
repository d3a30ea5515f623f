"""Until a step repeats an earlier one each value is tried in each step, and a trial reads what earlier trials made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.conftest import OpenSession
from tests.runtime.rigs.side_by_side import assert_same_as_plain
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.recompute.held_results import HeldResults
from vdnn.runtime.recompute.trial import Trial

_DEEP = 8


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[torch.UntypedStorage]]]:
    """The storages that trials held, while they exist."""
    storages: list[weakref.ref[torch.UntypedStorage]] = []
    hold = HeldResults.hold

    def noted(self: HeldResults, managed: Any, storage: torch.UntypedStorage) -> None:
        storages.append(weakref.ref(storage))
        hold(self, managed, storage)

    monkeypatch.setattr(HeldResults, "hold", noted)
    return storages


def _alive(made: list[weakref.ref[torch.UntypedStorage]]) -> int:
    gc.collect()
    return sum(one() is not None for one in made)


def _network() -> tuple[nn.Module, torch.Tensor]:
    """Each of its saves but the first is recomputed from the one before."""
    torch.manual_seed(0)
    layers = [one for _ in range(_DEEP) for one in (nn.Linear(8, 8), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(4, 8)


def test_a_trial_recomputes_nothing_that_earlier_ones_made(open_session: OpenSession) -> None:
    model, x = _network()
    session = open_session("recompute-all")

    def step() -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    assert_same_as_plain(session, step, model)
    assert session.counters.discarded >= _DEEP
    assert session.counters.recomputes <= session.counters.discarded


def test_each_value_is_tried_in_each_step_until_steps_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, run = [], Trial.run

    def noted(trial: Trial) -> torch.Tensor:
        trials.append(trial)
        return run(trial)

    monkeypatch.setattr(Trial, "run", noted)
    model, x = _network()
    counts = []
    with vdnn.offload("recompute-all", device="sim", min_bytes=0) as session:
        for _ in range(5):
            model(x).square().sum().backward()
            session.step()
            counts.append(len(trials))
            trials.clear()
    assert counts[0] >= 2 * _DEEP
    assert counts == [counts[0], 0, 0, 0, 0]


def test_at_most_four_results_are_held(made: list[weakref.ref[torch.UntypedStorage]]) -> None:
    model, x = _network()
    with vdnn.offload("recompute-all", device="sim", min_bytes=0):
        loss = model(x).square().sum()
        assert len(made) > 4
        assert _alive(made) == 4
        loss.backward()


def test_the_first_use_releases_what_is_held(made: list[weakref.ref[torch.UntypedStorage]]) -> None:
    model, x = _network()
    alive: list[int] = []
    with vdnn.offload("recompute-all", device="sim", min_bytes=0):
        loss = model(x)
        loss.register_hook(lambda _: alive.append(_alive(made)))
        model[-2].weight.register_hook(lambda _: alive.append(_alive(made)))
        loss.sum().backward()
    assert alive == [4, 0]


def test_the_end_of_a_step_releases_what_is_held(made: list[weakref.ref[torch.UntypedStorage]]) -> None:
    model, x = _network()
    with vdnn.offload("recompute-all", device="sim", min_bytes=0) as session:
        loss = model(x).sum()
        session.step()
        assert made
        assert not _alive(made)
        loss.backward()


def test_a_graph_that_is_dropped_takes_what_is_held_with_it(made: list[weakref.ref[torch.UntypedStorage]]) -> None:
    model, x = _network()
    with vdnn.offload("recompute-all", device="sim", min_bytes=0):
        loss = model(x).sum()
        assert _alive(made)
        del loss
        assert not _alive(made)


def test_a_result_of_another_stream_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    lent, lend = [], HeldResults.lend

    def of_another(self: HeldResults, managed: Any) -> bool:
        self._held.update({key: (storage, object()) for key, (storage, _) in self._held.items()})  # type: ignore[misc]
        lent.append(lend(self, managed))
        return lent[-1]

    monkeypatch.setattr(HeldResults, "lend", of_another)
    model, x = _network()
    with vdnn.offload("recompute-all", device="sim", min_bytes=0) as session:
        model(x).square().sum().backward()
        assert session.counters.recomputes > session.counters.discarded
    assert lent
    assert not any(lent)


def test_sessions_that_follow_steps_hold_nothing(made: list[weakref.ref[torch.UntypedStorage]]) -> None:
    model, x = _network()
    with (
        VirtualMachine("titan-x", fake=False) as machine,
        vdnn.offload("vdnn-all", device=machine, measure=True, min_bytes=0),
    ):
        model(x).square().sum().backward()
    assert not made
