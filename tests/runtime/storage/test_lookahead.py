"""The search for reloads ahead of their uses visits each storage a bounded number of times in a backward pass."""

from __future__ import annotations

from typing import Any

import pytest

from vdnn.runtime.storage.lookahead import Lookahead


class OnDevice:
    """A storage that needs no reload, and counts how often it was visited."""

    def __init__(self) -> None:
        self.position = -1
        self.visits = 0
        self.source = self.transport = self.copy = self.reloaded = self
        self.storage = self

    def reference(self) -> OnDevice:
        self.visits += 1
        return self


@pytest.mark.parametrize("saves_of_an_operation", [1, 2, 3, 7])
def test_each_storage_is_visited_once_though_operations_use_their_saves_in_ascending_order(
    saves_of_an_operation: int,
) -> None:
    lookahead, saved = Lookahead(), [OnDevice() for _ in range(saves_of_an_operation * 30)]
    for one in saved:
        given: Any = one
        lookahead.note(given)
    for one in saved:
        one.visits = 0
    for end in range(len(saved), 0, -saves_of_an_operation):
        for one in saved[end - saves_of_an_operation : end]:
            used: Any = one
            lookahead.used(used)
    assert max(one.visits for one in saved) <= saves_of_an_operation


def test_each_storage_is_visited_once_though_recomputes_use_what_lies_far_ahead() -> None:
    lookahead, saved = Lookahead(), [OnDevice() for _ in range(200)]
    for one in saved:
        given: Any = one
        lookahead.note(given)
    for one in saved:
        one.visits = 0
    for index in range(199, 0, -1):
        for one in (*saved[max(0, index - 40) : index - 20], saved[index]):
            used: Any = one
            lookahead.used(used)
    assert max(one.visits for one in saved) <= 1


def test_a_second_backward_pass_looks_ahead_from_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    lookahead, saved = Lookahead(), [OnDevice() for _ in range(40)]
    for one in saved:
        given: Any = one
        lookahead.note(given)
    for backward in range(2):
        monkeypatch.setattr("vdnn.runtime.storage.lookahead._graph_task", lambda backward=backward: backward)
        for one in saved:
            one.visits = 0
        for one in reversed(saved):
            used: Any = one
            lookahead.used(used)
        assert all(one.visits for one in saved[:-1])
