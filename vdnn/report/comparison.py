"""Comparison: the cells of one workload on one device, side by side, with what everything kept took as the measure.

Only what ran in the same place by the same clock is compared, compiled with compiled. A step that was saved without a
cell (by a session) makes cells of its own: its recording says what it takes with everything kept, its timeline what it
took.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vdnn.report.cell import Cell
from vdnn.report.run_folder import Run
from vdnn.step.saved_step import SavedStep
from vdnn.step.timeline import Timeline, Track

_PLACE_OF_CLOCK = {"virtual": "virtual", "device": "cuda", "host": "sim"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """`cells` in the order of the run."""

    workload: str
    batch: int | None
    place: str | None
    device: str
    clock: str | None
    compiled: bool
    cells: tuple[Cell, ...]

    @property
    def plain(self) -> Cell | None:
        """As it ended, which may be out of memory."""
        return next((cell for cell in self.cells if cell.is_plain), None)

    @property
    def baseline(self) -> Cell | None:
        """The plain one, if it ran."""
        return next((cell for cell in self.cells if cell.is_plain and cell.is_measured), None)

    @property
    def measured(self) -> tuple[Cell, ...]:
        """What has a place in a picture of memory against time."""
        return tuple(cell for cell in self.cells if cell.is_measured)

    @property
    def unmeasured(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if not cell.is_measured)

    @property
    def in_order(self) -> list[Cell]:
        """Plain, vdnn from the largest peak down, and the peers."""
        return sorted(
            self.cells, key=lambda cell: (not cell.is_plain, not cell.is_vdnn, cell.peer, -(cell.peak_bytes or 0))
        )

    def more_time(self, cell: Cell) -> float | None:
        """0.05: five per cent more than plain."""
        base = self.baseline
        return None if base is None or not base.step_ns or not cell.step_ns else cell.step_ns / base.step_ns - 1

    def memory_share(self, cell: Cell) -> float | None:
        """0.4: two fifths of plain's peak."""
        base = self.baseline
        return None if base is None or not base.peak_bytes or not cell.peak_bytes else cell.peak_bytes / base.peak_bytes

    @property
    def name(self) -> str:
        return f"{self.workload}{'' if self.batch is None else f', batch {self.batch}'}"

    @property
    def where(self) -> str:
        """The device, and whether it was there: "virtual h100"."""
        device = self.device or "device not named"
        if self.place == "virtual" or self.clock == "virtual":
            device = device if "virtual" in device else f"virtual {device}"
            device = f"{device}, tiny" if self.is_tiny else device
        elif self.place == "sim":
            device = f"simulated, {device}"
        return f"{device}, compiled" if self.compiled else device

    @property
    def is_virtual(self) -> bool:
        return self.place == "virtual" or self.clock == "virtual"

    @property
    def is_tiny(self) -> bool:
        """Real tensors at a small size on a virtual machine: gradients are real, times say nothing of a full size."""
        return self.place == "sim" and self.clock == "virtual"


def comparisons(run: Run) -> tuple[Comparison, ...]:
    """In the order in which the run has them. What broke before it knew its device belongs to those that got further,
    if they are all of one."""
    found: dict[tuple[object, ...], list[Cell]] = {}
    homeless: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells_of_run(run):
        kind = cell.workload, cell.batch, cell.place, cell.compiled
        if cell.device or cell.is_measured:
            found.setdefault((kind, cell.device, cell.clock), []).append(cell)
        else:
            homeless.setdefault(kind, []).append(cell)
    for one, cells in homeless.items():
        homes = [key for key in found if key[0] == one]
        found.setdefault(homes[0] if len(homes) == 1 else (one, None, None), []).extend(cells)
    return tuple(_comparison(cells) for cells in found.values())


def workloads_of(compared: Iterable[Comparison]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.workload for one in compared))


def cells_of_run(run: Run) -> tuple[Cell, ...]:
    """Its own, and those that its steps make."""
    alone = (cell for step in run.steps if run.cell_of(step) is None for cell in cells_of_step(step))
    return (*run.cells, *alone)


def cells_of_step(step: SavedStep) -> tuple[Cell, ...]:
    """With everything kept, as the recording has it; and as it went."""
    recording, shown = step.recording, step.measured or step.predicted
    if recording is None:
        return ()
    place = {"place": _PLACE_OF_CLOCK.get(recording.clock), "clock": recording.clock, "device": recording.device_name}
    kept = Cell(
        step.name,
        "plain",
        said="not run: what the recording says of the step with everything kept",
        step_ns=recording.compute_ns,
        peak_bytes=recording.peak_bytes,
        **place,  # type: ignore[arg-type]
    )
    if shown is None:
        return (kept,)
    return kept, _cell_under_plan(step, shown, place)


def _cell_under_plan(step: SavedStep, shown: Timeline, place: dict[str, str | None]) -> Cell:
    plan, predicted = step.plan, step.predicted
    return Cell(
        step.name,
        "vdnn" if plan is None else peer_of_policy(plan.policy),
        budget_bytes=None if plan is None else plan.budget_bytes,
        said="" if step.measured is not None else "not run: predicted",
        step_ns=shown.step_ns,
        peak_bytes=shown.peak_bytes,
        host_bytes=None if plan is None else plan.offloaded_bytes,
        to_host_bytes=shown.copied_bytes(Track.TO_HOST),
        to_device_bytes=shown.copied_bytes(Track.TO_DEVICE),
        stall_ns=shown.stall_ns,
        predicted_step_ns=None if predicted is None or step.measured is None else predicted.step_ns,
        predicted_peak_bytes=None if predicted is None or step.measured is None else predicted.peak_bytes,
        step=step.name,
        **place,  # type: ignore[arg-type]
    )


def peer_of_policy(policy: str) -> str:
    """vdnn's own plans are vdnn's; those of the literature keep their names."""
    return f"vdnn-{policy}" if policy in ("auto", "auto-offload", "keep") else policy


def _comparison(cells: Sequence[Cell]) -> Comparison:
    first = cells[0]
    return Comparison(first.workload, first.batch, first.place, first.device, first.clock, first.compiled, tuple(cells))
