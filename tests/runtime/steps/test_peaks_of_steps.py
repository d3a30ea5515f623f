"""The peak of a step that is read once, at its end, from statistics with one peak since the user's last reset."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vdnn.runtime.steps.watched_step import WatchedStep


def step(*, hooks_bytes: int = 0, is_measured: bool = False, checked_bytes: int | None = 500) -> SimpleNamespace:
    """A finished step: its hooks saw `hooks_bytes`, and the checked steps of its plan took `checked_bytes`. None: it
    followed no plan."""
    executor = None if checked_bytes is None else SimpleNamespace(checked_bytes=checked_bytes, checked_steps=0)
    return SimpleNamespace(peak_bytes=hooks_bytes, meter=object() if is_measured else None, executor=executor)


def found(one: SimpleNamespace, last_bytes: int, before_bytes: int) -> int:
    return WatchedStep.own_peak(one, last_bytes, before_bytes)  # type: ignore[arg-type]


def test_a_peak_from_before_the_step_is_not_its_own() -> None:
    """Plain PyTorch ran before the session and took 900. A settled step was planned again for 400 less because of it,
    on the first GPU."""
    assert found(step(), 900, 900) == 500


def test_a_peak_that_rose_in_the_step_is_its_own() -> None:
    assert found(step(), 950, 900) == 950


@pytest.mark.parametrize("last_bytes", [300, 900])
def test_a_step_without_a_plan_took_at_most_what_was_read(last_bytes: int) -> None:
    assert found(step(checked_bytes=None), last_bytes, 900) == last_bytes


def test_a_measured_step_is_checked_and_its_hooks_count() -> None:
    measured = step(hooks_bytes=520, is_measured=True)
    assert found(measured, 510, 900) == 520
    assert (measured.executor.checked_bytes, measured.executor.checked_steps) == (520, 1)
