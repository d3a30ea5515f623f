"""Small proofs for `make test` and long ones for `make test-full`.

`quick_and_full` gives one test two sizes, and `examples` properties a third of their examples unless VDNN_EXAMPLES, a
factor, says otherwise. Properties draw other examples in each run.

The rest draws, by their names, some of the tests that differ in few parameters only. The others become `full`. A fault
that shows under one schedule or one budget alone then shows in some of the tests of `make test`, because each draws
another one, at a fraction of their time. `make test-full` runs all.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import hypothesis
import pytest
from hypothesis.strategies import SearchStrategy

LARGE_EXAMPLES = [
    hypothesis.HealthCheck.filter_too_much,
    hypothesis.HealthCheck.too_slow,
    hypothesis.HealthCheck.data_too_large,
]


def quick_and_full(names: str, quick: Any, full: Any) -> pytest.MarkDecorator:
    """The test with `names` as `quick` in `make test`, and as `full`, which is more of the same, in `make test-full`.
    Several names have tuples."""
    of_one, of_full = (values if "," in names else (values,) for values in (quick, full))
    return pytest.mark.parametrize(names, [pytest.param(*of_one), pytest.param(*of_full, marks=pytest.mark.full)])


def examples(count: int) -> int:
    """How many of `count` examples this run tries."""
    return max(5, round(count * float(os.environ.get("VDNN_EXAMPLES", "0.34"))))


def for_examples(count: int, check: Callable[..., None], **strategies: SearchStrategy[Any]) -> None:
    """Runs the check on `count` examples, the same each time. It shrinks none, which takes minutes for large ones."""
    settings = hypothesis.settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=LARGE_EXAMPLES,
    )
    settings(hypothesis.given(**strategies)(check))()


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
