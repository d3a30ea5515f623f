"""The lower bound equals results computed by hand, and raises without SciPy. test_auto.py compares it with all
plans."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from tests.planning.recordings import chain
from vdnn.errors import BudgetError, VdnnError
from vdnn.planning.bound.lower_bound import Bound, lower_bound
from vdnn.planning.costs import LinkCosts
from vdnn.planning.least_memory import least_bytes

EVEN = LinkCosts(1e9, 1e9, 2e9, 0)  # one nanosecond for each byte


def test_what_fits_takes_its_computing() -> None:
    recording = chain([10, 20, 30])
    assert lower_bound(recording, EVEN, recording.peak_bytes) == Bound(recording.compute_ns, is_whole=True)


def test_what_has_to_leave_has_to_come_back() -> None:
    """Three storages of 100 bytes are computed in no time. One has to be absent while the last is computed, and its
    copies overlap with nothing."""
    recording = chain([100, 100, 100], compute_ns=0)
    bound = lower_bound(recording, EVEN, recording.peak_bytes - 1)
    assert bound.is_whole
    assert 199 <= bound.step_ns <= 200


def test_a_slower_link_and_less_budget_make_it_longer() -> None:
    recording = chain([50, 60, 70, 80], compute_ns=40)
    budgets = range(least_bytes(recording), recording.peak_bytes + 1, 20)
    bounds = [lower_bound(recording, EVEN, budget).step_ns for budget in budgets]
    assert bounds == sorted(bounds, reverse=True)
    slow = LinkCosts(0.5e9, 0.5e9, 1e9, 0)
    assert lower_bound(recording, slow, budgets[0]).step_ns > bounds[0]


def test_fewer_anchors_are_lower_and_never_higher() -> None:
    recording = chain([50, 60, 70, 80, 20, 90], compute_ns=40)
    budget = least_bytes(recording)
    bounds = [lower_bound(recording, EVEN, budget, anchors=count).step_ns for count in (2, 3, 5, 100)]
    assert bounds[0] <= bounds[-1]
    assert max(bounds) == bounds[-1]


def test_a_budget_that_nothing_meets_is_refused() -> None:
    recording = chain([10, 20, 30])
    with pytest.raises(BudgetError):
        lower_bound(recording, EVEN, least_bytes(recording) - 1)


def test_the_gap_is_a_fraction_of_the_bound() -> None:
    assert Bound(200, is_whole=False).gap(210) == pytest.approx(0.05)
    assert Bound(200, is_whole=False).gap(199) == 0
    assert Bound(0, is_whole=True).gap(0) == 0


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_scipy(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    recording = chain([100, 100, 100])
    with pytest.raises(VdnnError, match=r"pip install 'vdnn\[plan\]'"):
        lower_bound(recording, EVEN, recording.peak_bytes - 1)
