"""One step in virtual time: torch's own ways in a compiled graph, each beside vdnn's plan at the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.compiled.eager import EagerStep
from vdnn.bytesize import format_bytes
from vdnn.hardware import HardwareProfile
from vdnn.integrations.compile_options import KNAPSACK_SHARES, RegionCuts, plans_of
from vdnn.integrations.compiled_moves import RegionMove
from vdnn.integrations.region_plan import RegionPlan, RegionPlanner
from vdnn.planning.costs import profile_costs
from vdnn.runtime.machine.graph_step import GraphStep

OFFLOADS_ALL = "offloading of all"
_NO_BUDGET = 1 << 62


@dataclass(frozen=True, slots=True)
class Row:
    """`theirs` names torch's way. The budget is what it holds; times are of a step, `kept_ns` with torch's own cut.
    `eager_ns` is None if no plan of the eager step meets the budget."""

    network: str
    card: str
    theirs: str
    budget_bytes: int
    kept_bytes: int
    kept_ns: int
    theirs_ns: int
    ours_ns: int
    by: str
    offloaded_bytes: int
    eager_kept_ns: int
    eager_ns: int | None

    @property
    def cells(self) -> list[str]:
        """The row as text."""
        return [
            self.network,
            self.card,
            self.theirs,
            f"{self.budget_bytes / self.kept_bytes:.0%}",
            format_bytes(self.budget_bytes),
            f"{self.kept_ns / 1e6:.1f}",
            f"{self.theirs_ns / self.kept_ns:.3f}",
            f"{self.ours_ns / self.kept_ns:.3f}",
            "none" if self.eager_ns is None else f"{self.eager_ns / self.kept_ns:.3f}",
            format_bytes(self.offloaded_bytes),
            self.by,
        ]


HEADER = ("network", "card", "torch's", "bytes", "budget", "ms kept", "torch's", "vdnn's", "eager", "offloaded", "cut")


def rows_of(network: str, cuts: RegionCuts, profile: HardwareProfile) -> Iterator[Row]:
    """One row for each of torch's ways."""
    unlimited = RegionPlanner(_NO_BUDGET, profile)
    kept = unlimited.plan(cuts.plain)
    if kept is None:
        raise RuntimeError(f"{network} fits no card at all.")
    eager = EagerStep(network, profile)
    ends_bytes = cuts.plain.held.inputs_and_outputs_bytes
    theirs = [(f"budget {share}", unlimited.plan(cuts.knapsack(share))) for share in KNAPSACK_SHARES]
    theirs.append((OFFLOADS_ALL, offloading_of_all(cuts, unlimited, profile)))
    for name, their in theirs:
        if their is None or their.peak_bytes >= kept.peak_bytes:
            continue
        plans = plans_of(cuts, RegionPlanner(their.peak_bytes, profile))
        by, ours = min(plans.items(), key=lambda one: one[1].step_ns)
        yield Row(
            network,
            profile.name,
            name,
            their.peak_bytes,
            kept.peak_bytes,
            kept.step_ns,
            their.step_ns,
            ours.step_ns,
            by,
            ours.offloaded_bytes,
            eager.kept_ns,
            eager.step_ns(ends_bytes, their.peak_bytes),
        )


def offloading_of_all(cuts: RegionCuts, planner: RegionPlanner, profile: HardwareProfile) -> RegionPlan | None:
    """Torch's offloading of all that it saves: a value leaves behind its last use in forward, which waits for the copy.
    A reload begins as early as its copy takes, by the times of the nodes before its use, one after another.

    Torch has one stream for both directions; here it has two.
    """
    step = planner.step_of(cuts.plain)
    reloads = _prefetched(step, profile)
    moves = []
    for lifetime, storage, reload in zip(step.recording.lifetimes, step.storages, reloads, strict=True):
        release, use = min(lifetime.free_point, step.boundary), lifetime.uses[0]
        moves.append(RegionMove(storage.names[0], storage.nbytes, release, max(reload, step.boundary + 1), use))
    return planner.replayed(cuts.plain, step, moves)


def _prefetched(step: GraphStep, profile: HardwareProfile) -> list[int]:
    points, lifetimes = step.recording.points, step.recording.lifetimes
    costs, found = profile_costs(profile), [one.uses[0] for one in lifetimes]
    waiting: list[tuple[int, float]] = []
    for number in range(len(points) - 2, step.boundary, -1):
        index = points[number].lifetime
        if index is not None and lifetimes[index].uses[0] == number:
            copy_ns = costs.latency_ns + lifetimes[index].nbytes / costs.to_device_bytes_per_s * 1e9
            waiting.append((index, copy_ns))
        if waiting:
            index, left_ns = waiting[0]
            left_ns -= points[number].compute_ns
            waiting[0] = (index, left_ns)
            if left_ns <= 0:
                waiting.pop(0)
                found[index] = number - 1
    for index, _ in waiting:
        found[index] = step.boundary + 1
    return found
