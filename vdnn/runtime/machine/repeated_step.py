"""Repeats the allocations of a step on models of torch's allocator, without running the step again.

Two steps in a row show what stays reserved between them. If the first step leaves as many bytes, of the same sizes, as
it freed of earlier ones, the second step allocates and frees in the same way: its events are those of the first, with
storages of its own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Protocol


class Allocator(Protocol):
    """Serves allocations, each under a key."""

    def allocate(self, key: object, nbytes: int) -> None: ...
    def free(self, key: object) -> None: ...


class StepEvents:
    """Notes all allocations and releases from now on, in order. `before`: the bytes by key that are there."""

    def __init__(self, before: Mapping[int, int]) -> None:
        self._before = dict[object, int](before.items())
        self._events: list[tuple[object, int | None]] = []  # None: freed
        self._made: dict[object, int] = {}  # since then, and alive
        self._freed_before: dict[object, int] = {}  # that were there before

    def allocate(self, key: object, nbytes: int) -> None:
        if not nbytes:
            return
        self._events.append((key, nbytes))
        self._made[key] = nbytes

    def free(self, key: object) -> None:
        self._events.append((key, None))
        if self._made.pop(key, None) is None and key in self._before:
            self._freed_before[key] = self._before.pop(key)

    def repeat(self, allocators: Iterable[Allocator]) -> bool:
        """Lets `allocators`, which have served this step, serve the next one. False, and nothing is done, if that has
        to begin with other storages than this one."""
        successors = _matched(self._freed_before, self._made)
        if successors is None:
            return False
        for allocator in allocators:
            now: dict[object, object] = dict(successors)  # the key of this step -> the key in the next one
            for number, (key, nbytes) in enumerate(self._events):
                if nbytes is None:
                    allocator.free(now.pop(key, key))
                else:
                    now[key] = ("next", number)
                    allocator.allocate(now[key], nbytes)
        return True


def _matched(freed: Mapping[object, int], made: Mapping[object, int]) -> dict[object, object] | None:
    """For each storage that was there before and was freed, one of its size that the step has made instead. None if
    there are others."""
    of_size: dict[int, deque[object]] = defaultdict(deque)
    for key, nbytes in made.items():
        of_size[nbytes].append(key)
    found = {key: of_size[nbytes].popleft() for key, nbytes in freed.items() if of_size[nbytes]}
    return found if len(found) == len(freed) == len(made) else None
