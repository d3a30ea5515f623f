"""Readings of torch's settings, and what is known of the settings under which a node ran."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

from vdnn import _C
from vdnn.runtime.recompute.backend_flags import torch_settings

Run = Callable[[Callable[[], Any]], Any]


@contextlib.contextmanager
def _own_thread() -> Iterator[Run]:
    """Runs functions on one thread, which has observed nothing yet."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield lambda function: pool.submit(function).result()


def _node_number() -> int:
    return 1


def test_settings_that_did_not_change_are_the_same_object_and_no_change_is_missed() -> None:
    values: list[object] = [1, (2, 3), "ieee"]
    settings = _C.TorchSettings(tuple(lambda index=index: values[index] for index in range(3)), _node_number)
    before = settings.read()
    values[2] = "".join(["ie", "ee"])  # equal, and another object
    assert before == (1, (2, 3), "ieee")
    assert settings.read() is before
    for index, value in enumerate([4, (2, 5), "tf32"]):
        values[index] = value
        found = settings.read()
        assert found == tuple(values)
        assert found is not before
        assert settings.read() is found
        before = found


def test_a_setting_that_is_a_list_is_read_as_a_tuple_and_no_change_is_missed() -> None:
    order = [3, 1, 2]
    settings = _C.TorchSettings((lambda: 1, lambda: order, lambda: 2), _node_number)
    before = settings.read()
    assert before == (1, (3, 1, 2), 2)
    for now in ([3, 2, 1], [3, 2], [3, 2, 1, 0], []):
        order = list(now)
        found = settings.read()
        assert found == (1, tuple(now), 2)
        order = list(now)  # equal, and another object
        assert settings.read() is found


def test_a_setting_that_cannot_be_read_raises_its_error_unless_it_has_a_value_for_that() -> None:
    errors: list[Exception] = [RuntimeError("mixed")]

    def failing() -> object:
        raise errors[0]

    settings = _C.TorchSettings((lambda: 2, (failing, "mixed")), _node_number)
    assert settings.read() == (2, "mixed")
    assert settings.read() is settings.read()
    errors[0] = ValueError("no setting")
    with pytest.raises(ValueError, match="no setting"):
        settings.read()
    with pytest.raises(ValueError, match="no setting"):
        settings.observe()
    errors[0] = RuntimeError("no setting")
    with pytest.raises(RuntimeError, match="no setting"):
        _C.TorchSettings((failing,), _node_number).read()


def test_settings_say_which_getters_they_expect() -> None:
    with pytest.raises(TypeError, match="expected a getter, or one with its value where it raises RuntimeError"):
        _C.TorchSettings(((len,),), _node_number)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a tuple of getters and a function"):
        _C.TorchSettings((), _node_number, more=1)  # type: ignore[call-arg]


class _Node(NamedTuple):
    number: int

    def _sequence_nr(self) -> int:
        return self.number


class _Observed:
    """One setting, read at nodes whose numbers a test chooses."""

    def __init__(self) -> None:
        self.next, self.value = 0, 0
        self.settings = _C.TorchSettings((lambda: self.value,), lambda: self.next)

    def read(self, next_node: int, value: int, *, at_save: bool = False) -> None:
        self.next, self.value = next_node, value
        if at_save:
            self.settings.observe_at_save(torch.empty(0))
        else:
            self.settings.observe()

    def of(self, number: int) -> object:
        found = self.settings.of(_Node(number))
        return None if found is None else found[0]

    def of_saving(self, number: int) -> object:
        found = self.settings.at_save_of(_Node(number))
        return None if found is None else found[0]


def test_a_node_between_two_readings_that_agree_ran_under_them_and_another_is_not_known() -> None:
    with _own_thread() as run:
        observed = _Observed()
        run(lambda: [observed.read(1, 7), observed.read(4, 7), observed.read(6, 8), observed.read(9, 8)])
        found = run(lambda: [observed.of(number) for number in range(11)])
        assert found == [None, 7, 7, 7, None, None, 8, 8, 8, None, None]
        assert run(lambda: [observed.of_saving(number) for number in range(9)]) == [None] * 9
    assert [observed.of(number) for number in range(11)] == [None] * 11  # another thread has read nothing


def test_a_node_that_saved_ran_under_the_settings_at_its_save_unless_they_changed_between_two() -> None:
    with _own_thread() as run:
        observed = _Observed()
        run(lambda: [observed.read(3, 7, at_save=True), observed.read(3, 8, at_save=True)])
        assert run(lambda: (observed.of(2), observed.of_saving(2))) == (7, 7)  # not read again: the node still runs
        run(lambda: [observed.read(5, 8, at_save=True), observed.read(5, 8), observed.read(7, 9)])
        run(lambda: [observed.read(5, 9, at_save=True)])
        assert run(lambda: (observed.of(4), observed.of_saving(4))) == (None, None)
        assert run(lambda: [observed.settings.were_observed_at_save(n) for n in (2, 3, 4)]) == [True, False, True]


def test_a_thread_remembers_its_last_64_changes_of_settings_and_8192_saves() -> None:
    with _own_thread() as run:
        observed = _Observed()
        run(lambda: [observed.read(number + 1, number, at_save=True) for number in range(100)])
        assert run(lambda: [observed.of_saving(number) for number in range(100)]) == [None] * 36 + [*range(36, 100)]
        run(lambda: observed.read(100 + (1 << 13), 99, at_save=True))
        assert run(lambda: observed.of_saving(99)) is None
        assert run(lambda: observed.of_saving(98)) == 98


def test_a_reading_of_all_settings_runs_no_python() -> None:
    frames: list[str] = []
    observe = torch_settings.observe
    sys.setprofile(lambda frame, event, argument: frames.append(frame.f_code.co_name) if event == "call" else None)
    try:
        observe()
    finally:
        sys.setprofile(None)
    assert frames == []


def test_flushing_denormals_is_read_for_each_thread() -> None:
    assert _C.flushes_denormals() is False
    with _own_thread() as run:
        if not run(lambda: torch.set_flush_denormal(True)):
            pytest.skip("this CPU cannot flush denormals")
        assert run(_C.flushes_denormals) is True
        assert _C.flushes_denormals() is False
