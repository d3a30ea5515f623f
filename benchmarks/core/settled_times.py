"""The rows of the benchmarks of settled steps, and the program that measures, prints and writes them."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import vdnn


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledTimes:
    """Host time of all hooks of one step under a plan. Of so many lifetimes, `offloaded` are offloaded."""

    model: str
    budget_share: float  # of the peak of the step with everything kept
    points: int
    lifetimes: int
    offloaded: int
    python_us: float
    settled_us: float

    @property
    def times_less(self) -> float:
        return self.python_us / self.settled_us

    @property
    def actions(self) -> str:
        return f"{self.points} points, {self.offloaded} of {self.lifetimes} offloaded"

    def __str__(self) -> str:
        return (
            f"{self.model:16} {self.budget_share:.0%} of its peak: {self.actions}; hooks "
            f"{self.python_us / 1e3:.2f} ms, settled {self.settled_us / 1e3:.2f} ms, {self.times_less:.1f} x less"
        )


def measure_and_show(
    measure: Callable[[str | None], Sequence[SettledTimes]],
    arguments: Sequence[str] | None,
    *,
    program: str,
    description: str,
    default_device: str,
) -> int:
    """Measures with the options of a command line, prints each row, and writes them to a file where one is named."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.core.{program}", description=description)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    parser.add_argument("--library", metavar="PATH", help=f"a driver library, instead of {default_device}")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", vdnn.VdnnWarning)
    rows = measure(options.library)
    for row in rows:
        print(row)
    if options.json is not None:
        options.json.write_text(json.dumps({"format": 1, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return 0
