"""Draws, by their names, some of the tests that differ in few parameters only. The others become `full`.

A fault that shows under one schedule or one budget alone then shows in some of the tests of `make test`, because each
draws another one, at a fraction of their time. `make test-full` runs all.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def draw_one(items: Iterable[pytest.Item], names: Mapping[str, Mapping[Any, str]]) -> None:
    """Marks as `full` all but one of the items that differ only in parameters in `names`, which has for each what its
    values are called in the items' names. An item where one of them has another value stays."""
    alike: dict[str, list[pytest.Item]] = {}
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        shared = [one for one in names if one in given]
        if shared and all(given[one] in names[one] for one in shared):
            key = item.nodeid
            for one in shared:
                key = key.replace(names[one][given[one]], one)
            alike.setdefault(key, []).append(item)
    for key, group in alike.items():
        drawn = zlib.crc32(key.encode()) % len(group)
        for item in [*group[:drawn], *group[drawn + 1 :]]:
            item.add_marker(pytest.mark.full)


def draw_marked(items: Iterable[pytest.Item]) -> None:
    """Marks as `full` all but one in so many of the items of each test that has the mark `drawn(of=so many)`."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("drawn") and not item.get_closest_marker("full"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in tests.values():
        mark = group[0].get_closest_marker("drawn")
        assert mark is not None
        by_chance = sorted(group, key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in by_chance[-(-len(group) // mark.kwargs["of"]) :]:
            item.add_marker(pytest.mark.full)
