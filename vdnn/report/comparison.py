"""Comparison: the cells of one workload on one device, relative to plain PyTorch, which keeps everything.

Only cells of the same place and clock are compared, and compiled cells only with compiled ones. A step that was saved
without a cell (by a session) makes cells of its own: one from its recording with everything kept, and one from its
timeline.
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
    """Cells that can be compared, in the order of the run."""

    workload: str
    batch: int | None
    place: str | None
    device: str
    clock: str | None
    compiled: bool
    cells: tuple[Cell, ...]

    @property
    def plain(self) -> Cell | None:
        """The plain cell, whatever its status: it may have run out of memory."""
        return next((cell for cell in self.cells if cell.is_plain), None)

    @property
    def baseline(self) -> Cell | None:
        """The plain cell, if it was measured."""
        return next((cell for cell in self.cells if cell.is_plain and cell.is_measured), None)

    @property
    def measured(self) -> tuple[Cell, ...]:
        """The cells that have a point in a picture of memory against time."""
        return tuple(cell for cell in self.cells if cell.is_measured)

    @property
    def unmeasured(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if not cell.is_measured)

    @property
    def in_order(self) -> list[Cell]:
        """Plain first, then vdnn and then the peers, each by falling peak."""
        return sorted(
            self.cells, key=lambda cell: (not cell.is_plain, not cell.is_vdnn, cell.peer, -(cell.peak_bytes or 0))
        )

    def more_time(self, cell: Cell) -> float | None:
        """The extra time relative to plain: 0.05 is five per cent more."""
        base = self.baseline
        return None if base is None or not base.step_ns or not cell.step_ns else cell.step_ns / base.step_ns - 1

    def memory_share(self, cell: Cell) -> float | None:
        """The peak relative to plain's: 0.4 is two fifths of it."""
        base = self.baseline
        return None if base is None or not base.peak_bytes or not cell.peak_bytes else cell.peak_bytes / base.peak_bytes

    @property
    def name(self) -> str:
        return f"{self.workload}{'' if self.batch is None else f', batch {self.batch}'}"

    @property
    def where(self) -> str:
        """The device, with "virtual" or "simulated" if it was not present, as in "virtual h100"."""
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
        """True for real tensors of a tiny size on a virtual machine: gradients are real, times are not of full size."""
        return self.place == "sim" and self.clock == "virtual"


def comparisons(run: Run) -> tuple[Comparison, ...]:
    """The comparisons of a run, in its order. A cell that failed before its device was known joins the others of its
    workload, if those ran on one device only."""
    found: dict[tuple[object, ...], list[Cell]] = {}
    without_device: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells_of_run(run):
        kind = cell.workload, cell.batch, cell.place, cell.compiled
        if cell.device or cell.is_measured:
            found.setdefault((kind, cell.device, cell.clock), []).append(cell)
        else:
            without_device.setdefault(kind, []).append(cell)
    for group, cells in without_device.items():
        candidates = [key for key in found if key[0] == group]
        found.setdefault(candidates[0] if len(candidates) == 1 else (group, None, None), []).extend(cells)
    return tuple(_comparison(cells) for cells in found.values())


def workloads_of(compared: Iterable[Comparison]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.workload for one in compared))


def cells_of_run(run: Run) -> tuple[Cell, ...]:
    """The cells of the run, and those made from steps that no cell names."""
    from_steps = (cell for step in run.steps if run.cell_of(step) is None for cell in cells_of_step(step))
    return (*run.cells, *from_steps)


def cells_of_step(step: SavedStep) -> tuple[Cell, ...]:
    """One cell with everything kept, from the recording, and one from the timeline if the step has one."""
    recording, shown = step.recording, step.measured or step.predicted
    if recording is None:
        return ()
    place = {"place": _PLACE_OF_CLOCK.get(recording.clock), "clock": recording.clock, "device": recording.device_name}
    kept = Cell(
        step.name,
        "plain",
        said="not run: the recording's figures with everything kept",
        step_ns=recording.kept_ns,
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
    """The peer of a plan. vdnn's own policies get the prefix "vdnn-"; published policies keep their names."""
    return f"vdnn-{policy}" if policy in ("auto", "auto-offload", "keep") else policy


def _comparison(cells: Sequence[Cell]) -> Comparison:
    first = cells[0]
    return Comparison(first.workload, first.batch, first.place, first.device, first.clock, first.compiled, tuple(cells))
