"""`make test-fast` runs a few of the tests that differ in their parameters only, if all of them together take long.

thinned.txt has the name of each such test, behind a number: one in that many of its tests is drawn, by the names. The
others become `slow`, so that `make test` runs all. `python -m tests.thinned [tests/deferred]` measures the lane in one
process, about seven minutes, and writes the list, or the part of it that is below the folder.
"""

from __future__ import annotations

import math
import os
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path

import pytest

LIST = Path(__file__).with_suffix(".txt")
SHARE_S = 0.2  # processor time of what is left of a test
CHEAP_S = 0.05  # of one set of parameters: of those that take less at least one in four is left
DEFERRED = "tests/deferred/"


def name_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def families() -> dict[str, int]:
    """The tests that are thinned, and how many of each stand for one that is run."""
    lines = (line.split(" ", 1) for line in LIST.read_text().splitlines())
    return {name: int(of) for of, name in lines}


def thin(items: Iterable[pytest.Item], one_in: Mapping[str, int]) -> None:
    """Marks as `slow` all but a drawn share of the tests of each family."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        name = name_of(item.nodeid)
        if name in one_in and not item.get_closest_marker("full") and not item.get_closest_marker("slow"):
            tests[name].append(item)
    for name, group in tests.items():
        by_chance = sorted(group, key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in by_chance[math.ceil(len(group) / one_in[name]) :]:
            item.add_marker(pytest.mark.slow)


def one_in(count: int, taken_s: float) -> int:
    """How many of `count` tests, which took so long together, stand for one."""
    share = min(count, math.ceil(taken_s / SHARE_S))
    return min(share, 4) if taken_s < CHEAP_S * count else share


class Measured:
    """A plugin of pytest: the processor time of each test, with that of processes which it waited for. Where it is,
    tests/conftest.py thins nothing."""

    def __init__(self) -> None:
        self.__name__ = "measured families"
        self.taken_s: dict[str, list[float]] = defaultdict(list)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        begin = _processor_s()
        try:
            return (yield)
        finally:
            self.taken_s[name_of(item.nodeid)].append(_processor_s() - begin)


def _processor_s() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def main(folders: list[str]) -> int:
    measured = Measured()
    failed = pytest.main(
        ["-q", "-p", "no:cacheprovider", "--benchmark-disable", "-m", "not slow and not full", *folders], [measured]
    )
    chosen = {name: one_in(len(taken), sum(taken)) for name, taken in measured.taken_s.items()}
    rooms = tuple(name for name in (folders or ["tests/"]))
    others = {name: of for name, of in families().items() if not name.startswith(rooms)}
    if not folders:
        others |= {name: of for name, of in families().items() if name.startswith(DEFERRED)}
    found = {**others, **{name: of for name, of in chosen.items() if of > 1}}
    LIST.write_text("".join(f"{found[name]} {name}\n" for name in sorted(found)))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
