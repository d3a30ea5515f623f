"""The host time of a whole training step in each way of running it, over that of plain PyTorch.

Small models have the structure of models of full size, and follow the plans of these. They run on one thread, with
garbage collection on. All ways run in turn in one process, and a figure is the median of the processor time of the
training thread, which other load on the machine disturbs less than it disturbs the clock. A step is measured after
another one of its way, as in a loop: right after a step of another way it would also pay for the caches and the garbage
of that, 0.05 to 0.15 plain steps after checkpointing. Module hooks, settings and the end of the step are in it.
`excess` is the time over plain as a share of what checkpointing every block takes over plain, which contains a second
forward. The simulated device does not fill released memory with NaNs, which it does for tests. The table goes to
stdout, the progress to stderr.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch

import vdnn
from benchmarks.core.host_ways import (
    CHECKPOINT,
    LENGTHS_WAY,
    NEW_WAY,
    PLAIN,
    PLAIN_LENGTHS,
    PLAIN_NEW,
    SHARES,
    CountedGauges,
    Way,
    counted_gauges,
    settled,
    ways_of,
)
from benchmarks.core.small_plans import Model, models, recorded, small_plan
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn import _C
from vdnn.step.plan import Action, Plan

_ROUNDS = 15
_MOST_LEARNED = 24  # steps until a plan's step is settled: two in a row have to go alike
_ALWAYS = (PLAIN, PLAIN_LENGTHS, PLAIN_NEW, CHECKPOINT)  # what others are compared with
_PLAIN_OF = {LENGTHS_WAY: PLAIN_LENGTHS, NEW_WAY: PLAIN_NEW}  # of the same lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way. `excess` is None if checkpointing took no longer than plain. `readings` and `marks` are those of one
    step: readings of the memory statistics, and events on the stream. The counts of actions are None without a plan."""

    model: str
    way: str
    ms: float
    over_plain_ms: float
    excess: float | None
    readings: int
    marks: int
    recomputed: int | None = None
    offloaded: int | None = None


def measure(
    model: str,
    ways: dict[str, Way],
    rounds: int,
    *,
    plans: dict[str, Plan] | None = None,
) -> list[Row]:
    """Runs all ways in turn. `plans`: by the way that follows them, for the counts."""
    for way in ways.values():
        for _ in range(way.learns):
            _timed_ns(way)
    for name in map(settled, SHARES):
        if name in ways:
            _settle(name, ways[name])
    gc.collect()
    gc.freeze()  # collections cost what the steps make, and not what this program holds
    times: dict[str, list[int]] = {name: [] for name in ways}
    asked: dict[str, tuple[int, int]] = {}
    try:
        for _ in range(rounds):
            for name, way in ways.items():
                _timed_ns(way)
                before = CountedGauges.readings, CountedGauges.marks
                times[name].append(_timed_ns(way))
                asked[name] = CountedGauges.readings - before[0], CountedGauges.marks - before[1]
    finally:
        gc.unfreeze()
    return _rows(model, {name: statistics.median(taken) / 1e6 for name, taken in times.items()}, asked, plans or {})


def _rows(
    model: str, taken_ms: dict[str, float], asked: dict[str, tuple[int, int]], plans: dict[str, Plan]
) -> list[Row]:
    checkpoint_ms = taken_ms[CHECKPOINT] - taken_ms[PLAIN]
    rows = []
    for name, ms in taken_ms.items():
        over_ms = ms - taken_ms[_PLAIN_OF.get(name, PLAIN)]
        actions = [one.action for one in plans[name].lifetimes] if name in plans else None
        rows.append(
            Row(
                model=model,
                way=name,
                ms=ms,
                over_plain_ms=over_ms,
                excess=over_ms / checkpoint_ms if checkpoint_ms > 0 else None,
                readings=asked[name][0],
                marks=asked[name][1],
                recomputed=None if actions is None else actions.count(Action.RECOMPUTE),
                offloaded=None if actions is None else actions.count(Action.OFFLOAD),
            )
        )
    return rows


def _timed_ns(way: Way) -> int:
    way.before()
    begin_ns = time.thread_time_ns()
    way.step()
    taken_ns = time.thread_time_ns() - begin_ns
    for parameter in way.workload.model.parameters():
        parameter.grad = None
    return taken_ns


def _settle(name: str, way: Way) -> None:
    settling = None if way.session is None else way.session._engine.steps.settling
    for _ in range(_MOST_LEARNED):
        if settling is not None and settling.is_expected:
            return
        _timed_ns(way)
    raise RuntimeError(f"expected steps to settle under {name}, and they did not")


def measure_model(
    name: str, model: Model, wanted: Callable[[str], bool], rounds: int, device: Callable[[], _C.Device]
) -> list[Row]:
    whole, small = recorded(model.whole), recorded(model.small)
    plans = {share: small_plan(whole, small, share) for share in SHARES}
    with counted_gauges():
        ways = {way: one for way, one in ways_of(model, plans, device).items() if wanted(way)}
        return measure(name, ways, rounds, plans={settled(share): plan for share, plan in plans.items()})


def table(rows: Sequence[Row]) -> str:
    plain_ms = next(row.ms for row in rows if row.way == PLAIN)
    lines = [
        (
            row.way + ("" if row.recomputed is None else f" ({row.recomputed} recomputed, {row.offloaded} offloaded)"),
            f"{row.ms:.2f}",
            f"{row.over_plain_ms:.2f}",
            f"{row.over_plain_ms / plain_ms:.2f}",
            "" if row.excess is None else f"{row.excess:.2f}",
            str(row.readings or ""),
            str(row.marks or ""),
        )
        for row in rows
    ]
    header = ("way", "ms", "over plain", "over / plain", "excess", "readings", "marks")
    return render_table(rows[0].model, header, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.core.host_time", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--models", metavar="NAMES", help="only these, separated by commas (patterns such as 'GPT*')")
    parser.add_argument(
        "--ways", metavar="NAMES", help="only these beside plain and checkpoint, separated by semicolons ('*settled')"
    )
    parser.add_argument("--rounds", type=int, default=_ROUNDS, metavar="N", help=f"steps of each way ({_ROUNDS})")
    parser.add_argument("--library", metavar="PATH", help="a driver library, instead of a simulated device")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", vdnn.VdnnWarning)
    torch.set_num_threads(1)
    library: str | None = options.library
    chosen = {
        name: one for name, one in models().items() if _matches(name, options.models and options.models.split(","))
    }
    if not chosen:
        parser.error(f"no model is named {options.models!r}: there are {', '.join(models())}")
    patterns = options.ways and [*options.ways.split(";"), *_ALWAYS]
    progress = Progress("host_time", len(chosen))
    rows: list[Row] = []
    for name, model in chosen.items():
        progress.begin(name)
        found = measure_model(
            name,
            model,
            lambda way: _matches(way, patterns),
            options.rounds,
            lambda: _C.SimDevice(poison=False) if library is None else _C.CudaDevice(0, library),
        )
        print(table(found), flush=True)
        rows += found
    progress.end()
    if options.json is not None:
        made = {
            "format": 1,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "rounds": options.rounds,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(made, indent=1) + "\n")
    return 0


def _matches(name: str, patterns: Sequence[str] | None) -> bool:
    return not patterns or any(fnmatch(name, pattern) for pattern in patterns)


if __name__ == "__main__":
    sys.exit(main())
