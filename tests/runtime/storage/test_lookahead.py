"""The search for reloads ahead of their uses: what it issues, how often, and how many storages it looks at."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import pytest

from vdnn.runtime.storage.lookahead import Lookahead


class _Queue:
    """As much of a transport as the search asks."""

    def __init__(self) -> None:
        self.copied: deque[Any] = deque()
        self.issued: list[_Saved] = []
        self.most_in_flight = 1 << 30

    def reload_window_is_full(self, nbytes: int) -> bool:
        return sum(one.on_device is not None for one in self.issued) >= self.most_in_flight


class _Saved:
    """A storage that may be copied to the host and reloaded. Counts how often it is looked at."""

    def __init__(self, transport: _Queue) -> None:
        self.transport, self.nbytes, self.position = transport, 1, -1
        self.storage: object | None = transport
        self.copy: object | None = None
        self.is_waited_for = True
        self.on_device: object | None = None
        self.looks = 0
        self.reference = weakref.ref(self)

    @property
    def source(self) -> _Saved:
        return self

    @property
    def reloaded(self) -> _Saved | None:
        self.looks += 1
        return None if self.on_device is None else self

    @reloaded.setter
    def reloaded(self, reloaded: object | None) -> None:
        self.on_device = reloaded

    def evict(self) -> None:
        self.copy, self.storage = self.transport, None
        self.transport.copied.append(self.reference)

    def reload_early(self) -> bool:
        self.reloaded = self.transport
        self.transport.issued.append(self)
        return True


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Its last number is that of the backward pass that runs."""
    passes = [0]
    monkeypatch.setattr("vdnn.runtime.storage.lookahead._graph_task", lambda: passes[-1])
    return passes


def saved(count: int, *, evicted: bool = True) -> tuple[Lookahead, _Queue, list[Any]]:
    lookahead, queue = Lookahead(), _Queue()
    storages: list[Any] = [_Saved(queue) for _ in range(count)]
    for one in storages:
        lookahead.note(one)
        if evicted:
            one.evict()
    return lookahead, queue, storages


@pytest.mark.parametrize("saves_of_an_operation", [1, 2, 3, 7])
def test_each_is_reloaded_once_though_operations_use_their_saves_in_ascending_order(
    saves_of_an_operation: int, passes: list[int]
) -> None:
    lookahead, queue, storages = saved(saves_of_an_operation * 30)
    for end in range(len(storages), 0, -saves_of_an_operation):
        for one in storages[end - saves_of_an_operation : end]:
            lookahead.used(one)
            one.reloaded = None  # its last use
    assert len({id(one) for one in queue.issued}) == len(queue.issued) >= len(storages) - saves_of_an_operation


def test_few_are_looked_at_though_recomputes_use_what_lies_far_ahead(passes: list[int]) -> None:
    lookahead, queue, storages = saved(200)
    queue.most_in_flight, uses = 3, 0
    for index in range(199, 0, -1):
        for one in (*storages[max(0, index - 40) : index - 20], storages[index]):
            lookahead.used(one)
            uses += 1
        storages[index].reloaded = None
    assert sum(one.looks for one in storages) <= uses + len(storages)


def test_what_stays_on_the_device_is_not_looked_at(passes: list[int]) -> None:
    lookahead, queue, storages = saved(100, evicted=False)
    for one in reversed(storages):
        lookahead.used(one)
    assert not queue.issued
    assert all(one.looks == 0 for one in storages)


def test_the_next_backward_pass_reloads_again(passes: list[int]) -> None:
    lookahead, queue, storages = saved(40)
    for backward in range(2):
        passes.append(backward)
        queue.issued.clear()
        for one in storages:
            one.reloaded = None
        for one in reversed(storages):
            lookahead.used(one)
        assert queue.issued == storages[-2::-1]


def test_what_a_pass_evicts_behind_its_search_is_reloaded_in_that_pass(passes: list[int]) -> None:
    lookahead, queue, storages = saved(10, evicted=False)
    lookahead.used(storages[9])
    storages[3].evict()  # as a backward pass that saves makes guards do
    lookahead.used(storages[8])
    assert queue.issued == [storages[3]]


def test_a_position_that_was_taken_earlier_counts(passes: list[int]) -> None:
    """The gate keeps a save, and its storage is managed later."""
    lookahead, queue = Lookahead(), _Queue()
    given: list[Any] = [_Saved(queue) for _ in range(3)]
    position = lookahead.take_position()
    lookahead.note(given[1])
    lookahead.note(given[2])
    lookahead.note(given[0], position)
    for one in given[:2]:
        one.evict()
    lookahead.used(given[2])
    assert queue.issued == [given[1], given[0]]


def test_forgetting_what_is_gone_changes_nothing_for_the_rest(passes: list[int]) -> None:
    lookahead, queue, storages = saved(60)
    queue.most_in_flight = 2
    lookahead.used(storages[50])
    first = list(queue.issued)
    del storages[:20]
    later: list[Any] = [_Saved(queue) for _ in range(10)]
    for one in later:
        lookahead.note(one)
    assert len(lookahead) < 60, "it was pruned"
    for one in first:
        one.reloaded = None
    lookahead.used(storages[28])
    assert [one.position for one in queue.issued[2:]] == [47, 46]
