"""Draws one, by its name, of the tests that differ in one parameter only. The others become `full`.

A fault that shows under one schedule or one budget alone then shows in some of the tests of `make test`, because each
draws another one, at a fraction of their time. `make test-full` runs all.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def draw_one(items: Iterable[pytest.Item], parameter: str, names: Mapping[Any, str]) -> None:
    """Marks as `full` all but one of the items that differ in `parameter` only, among those where it has one of the
    values in `names`. The names are what the values are called in the items' names."""
    alike: dict[str, list[pytest.Item]] = {}
    for item in items:
        call = getattr(item, "callspec", None)
        name = None if call is None else names.get(call.params.get(parameter))
        if name is not None:
            alike.setdefault(item.nodeid.replace(name, parameter), []).append(item)
    for shared, group in alike.items():
        drawn = zlib.crc32(shared.encode()) % len(group)
        for item in [*group[:drawn], *group[drawn + 1 :]]:
            item.add_marker(pytest.mark.full)


def draw_share(items: Iterable[pytest.Item], *parameters: str, of: int) -> None:
    """Marks as `full` all but one of so many of the items that have all these parameters."""
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        if all(one in given for one in parameters) and zlib.crc32(item.nodeid.encode()) % of:
            item.add_marker(pytest.mark.full)
