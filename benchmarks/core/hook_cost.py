"""`make bench`: measures the cost of hooks for a save and its use, as a multiple of hooks that do nothing.

A chain of small operations runs forward and backward, without hooks and under each kind of hooks in turn, for many
rounds, so that other load on the machine affects all alike. The cost is the processor time of the training thread in
the best round, minus that of the plain chain. All that is repeated, and the medians of the repetitions count. No byte
is copied: the simulated device only keeps time. `--json PATH` writes the figures with units in their names, and as
`kept_settled` and `offloaded_settled` the multiples of hooks that do nothing under a settled plan.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import vdnn
from benchmarks.core.peer_hooks import Absent, open_peers
from benchmarks.core.settled_chain import chain_plan
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn import _C
from vdnn.runtime.session.session import Session
from vdnn.step.plan import Plan

SAVES = 2000
ELEMENTS = 64
# About ten seconds in all: processors change their speed, and every kind of hooks should run at the highest.
ROUNDS = 6
REPETITIONS = 7
# So many chains follow a plan before it is settled.
LEARNED = 4
# 64 storages of 256 bytes in each direction: all others are offloaded, and reloaded ahead of their use.
WINDOW = "16KiB"
# With this as min_bytes, no save is managed.
LARGER_THAN_A_SAVE = "1KiB"

PLAIN, NO_OP, KEPT, OFFLOADED = "plain", "no-op hooks", "vdnn, kept: too small", "vdnn, offloaded and reloaded"
STILL_ON_DEVICE = "vdnn, offloaded, used before it is released"
KEPT_SETTLED = "vdnn, kept by a settled plan"
OFFLOADED_SETTLED = "vdnn, offloaded by a settled plan, reloaded"
# As multiples of no-op hooks.
TARGETS = {KEPT: 3.0, OFFLOADED: 20.0, KEPT_SETTLED: 2.0, OFFLOADED_SETTLED: 8.0}


@dataclass(frozen=True, slots=True)
class HookCost:
    """The cost of one save and its use, in addition to their cost without hooks."""

    way: str
    cost_ns: float
    # None if the time of hooks that do nothing could not be measured, because the machine was too busy.
    no_ops: float | None
    target: float | None


@dataclass(frozen=True, slots=True)
class HookCosts:
    """The costs of one run. `plain_ns` is the cost of an operation, forward and backward, without hooks."""

    plain_ns: float
    rows: tuple[HookCost, ...]
    absent: tuple[Absent, ...]


class NoOp:
    """Hooks that do nothing, in the same form as vdnn's."""

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def chain(x: torch.Tensor) -> None:
    """Run the chain. Each operation saves its input, and the backward pass uses it once."""
    y = x
    for _ in range(SAVES):
        y = y.sin()
    y.sum().backward()  # type: ignore[no-untyped-call]


def timed_ns(x: torch.Tensor, hooks: AbstractContextManager[object]) -> int:
    """Processor time of this thread, which also runs the backward pass of CPU tensors."""
    gc.collect()  # garbage of other kinds of hooks must not count here
    begin_ns = time.thread_time_ns()
    with hooks:
        chain(x)
    return time.thread_time_ns() - begin_ns


def vdnn_ways() -> dict[str, Session]:
    def open_session(min_bytes: int | str, window: str, plan: Plan | None = None) -> Session:
        device = _C.SimDevice(moves_bytes=False)
        return vdnn.offload(
            device=device,  # type: ignore[arg-type]  # a native device stands for the CPU's tensors in tests
            min_bytes=min_bytes,
            plan=plan,
            limits=vdnn.Limits(offload_window=window, reload_window=window),
        )

    return {
        KEPT: open_session(LARGER_THAN_A_SAVE, WINDOW),
        STILL_ON_DEVICE: open_session(0, "1GiB"),
        OFFLOADED: open_session(0, WINDOW),
        KEPT_SETTLED: open_session(0, WINDOW, chain_plan(SAVES - 1, ELEMENTS, offloads=False)),
        OFFLOADED_SETTLED: open_session(0, WINDOW, chain_plan(SAVES - 1, ELEMENTS, offloads=True)),
    }


def settle(x: torch.Tensor, sessions: Mapping[str, Session]) -> None:
    """Runs the chain until the plans of the sessions that have one are settled."""
    for name in (KEPT_SETTLED, OFFLOADED_SETTLED):
        for _ in range(LEARNED):
            with sessions[name]:
                chain(x)


def measure(rounds: int, repetitions: int, progress: Progress) -> HookCosts:
    x = torch.rand(ELEMENTS, requires_grad=True)  # too few for torch to use more than one thread
    no_op = NoOp()
    sessions = vdnn_ways()
    peers, absent = open_peers(x.device)
    ways: dict[str, AbstractContextManager[object]] = {
        PLAIN: contextlib.nullcontext(),
        NO_OP: torch.autograd.graph.saved_tensors_hooks(no_op.pack, no_op.unpack),
        **sessions,
        **peers,
    }
    settle(x, sessions)
    repeated = []
    for repetition in range(repetitions):
        progress.begin(f"repetition {repetition + 1}")
        best = dict.fromkeys(ways, sys.maxsize)
        for _ in range(rounds):
            # All others are divided by the difference of the first two, so those run more often.
            for name in (PLAIN, NO_OP, *ways, PLAIN, NO_OP):
                best[name] = min(best[name], timed_ns(x, ways[name]))
        repeated.append(costs_of(best, absent))
    _require_offloads(sessions, rounds * repetitions)
    for session in sessions.values():
        session.close()
    return medians_of(repeated)


def medians_of(repeated: Sequence[HookCosts]) -> HookCosts:
    """The median of each figure of several measurements."""
    rows = [
        HookCost(
            same[0].way,
            statistics.median(row.cost_ns for row in same),
            _median_of_known([row.no_ops for row in same]),
            same[0].target,
        )
        for same in zip(*(costs.rows for costs in repeated), strict=True)
    ]
    return HookCosts(statistics.median(costs.plain_ns for costs in repeated), tuple(rows), repeated[0].absent)


def _median_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _require_offloads(sessions: dict[str, Session], rounds: int) -> None:
    """Raise if the sessions did not offload and reload as often as the measurement assumes."""
    kept, on_device, moved = (sessions[name].counters for name in (KEPT, STILL_ON_DEVICE, OFFLOADED))
    expected = (SAVES - 1) * rounds  # the first input is a leaf, which is kept
    offloads = (kept.storages, on_device.storages, moved.storages)
    if offloads != (0, expected, expected):
        raise RuntimeError(f"expected offloads {(0, expected, expected)} of {kept.saves} saves each, got {offloads}")
    if on_device.reloads or moved.reloads < 0.9 * expected:
        raise RuntimeError(f"expected 0 and about {expected} reloads, got {on_device.reloads} and {moved.reloads}")
    settled = sessions[OFFLOADED_SETTLED].counters
    if settled.reloads < 0.9 * expected or settled.demand_reloads:
        raise RuntimeError(
            f"expected about {expected} reloads ahead of their use under a settled plan, got {settled.reloads}, "
            f"{settled.demand_reloads} of them on demand"
        )


def costs_of(best: Mapping[str, int], absent: Sequence[Absent]) -> HookCosts:
    """The costs, from the processor time of the best round of each way."""
    plain_ns = best[PLAIN] / SAVES
    no_op_ns = best[NO_OP] / SAVES - plain_ns
    rows = []
    for name, taken_ns in best.items():
        if name == PLAIN:
            continue
        cost_ns = taken_ns / SAVES - plain_ns
        rows.append(HookCost(name, cost_ns, cost_ns / no_op_ns if no_op_ns > 0 else None, TARGETS.get(name)))
    return HookCosts(plain_ns, tuple(rows), tuple(absent))


def settled_multiples(costs: HookCosts) -> dict[str, float | None]:
    """The costs under a settled plan, as multiples of hooks that do nothing."""
    multiples = {row.way: row.no_ops for row in costs.rows}
    return {"kept_settled": multiples[KEPT_SETTLED], "offloaded_settled": multiples[OFFLOADED_SETTLED]}


def render(costs: HookCosts) -> str:
    header = ("hooks", "us a save", "x no-op", "target", "met")
    cells = [
        (
            row.way,
            f"{row.cost_ns / 1e3:.2f}",
            "-" if row.no_ops is None else f"{row.no_ops:.1f}",
            "-" if row.target is None else f"{row.target:.0f}",
            "-" if row.target is None or row.no_ops is None else ("yes" if row.no_ops <= row.target else "NO"),
        )
        for row in costs.rows
    ]
    remark = (
        f"Measured: a chain of {SAVES} sin of {ELEMENTS} elements, forward and backward; processor time beyond the "
        f"plain chain's {costs.plain_ns / 1e3:.2f} us an operation, all kinds in turn, median of {REPETITIONS} "
        f"repetitions of the best of {ROUNDS} rounds. One save "
        "and its use: pack, offload, release, reload, unpack, on a simulated device that moves no bytes."
    )
    remarks = [remark, *(str(one) for one in costs.absent)]
    if any(row.no_ops is None for row in costs.rows):
        remarks.insert(
            1, "No multiples: the time of hooks that do nothing could not be measured. This machine is too busy."
        )
    return render_table("7. Cost of hooks", header, cells, remarks)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.core.hook_cost", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    options = parser.parse_args(arguments)
    # One of the sessions offloads nothing on purpose, so its warning is not wanted.
    warnings.simplefilter("ignore", vdnn.VdnnWarning)
    gc.freeze()  # ignore torch's own objects: collecting them would take longer than the chains
    progress = Progress("hook_cost", REPETITIONS)
    costs = measure(ROUNDS, REPETITIONS, progress)
    progress.end()
    print(render(costs))
    if options.json is not None:
        options.json.write_text(json.dumps({"format": 1, **settled_multiples(costs), **asdict(costs)}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
