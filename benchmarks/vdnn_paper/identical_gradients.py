"""Trains a small VGG-16 for real on this CPU, and compares its gradients under vdnn with plain PyTorch's bit for bit.

Tensors have data and copies move it. The simulated device runs each copy as early or as late as allowed, and overwrites
released memory. Integrity mode hashes each storage before its offload and after its reload, and raises if the two
differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import vdnn
from benchmarks.models import Workload, vgg16
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from benchmarks.vdnn_paper.policy_steps import KEEP, VDNN_ALL, VDNN_CONV
from vdnn import _C
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.step.timeline import Track

BATCH, SIDE = 2, 64
# One to warm up, one that is recorded, one that follows the plan and whose gradients count.
STEPS = 3
# Small, so that maps of 2 MiB and less are released and reloaded instead of staying within a window.
OFFLOAD_WINDOW, RELOAD_WINDOW = "1MiB", "3MiB"
SCHEDULES = (_C.Schedule.EAGER, _C.Schedule.LAZY)


@dataclass(frozen=True, slots=True)
class IdentityFigures:
    """One way of running the step, under both schedules, which copy the same bytes in the step that counts."""

    name: str
    identical_early: bool
    identical_late: bool
    offloaded: int
    to_host_bytes: int
    reloaded: int
    to_device_bytes: int

    @property
    def identical(self) -> bool:
        return self.identical_early and self.identical_late


@dataclass(frozen=True, slots=True)
class _Run:
    identical: bool
    peak_bytes: int
    copies: tuple[int, int, int, int]


class SameStep:
    """One workload with plain PyTorch's gradients."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.workload: Workload = vgg16(BATCH, SIDE)
        self.plain = self._gradients()

    def _gradients(self) -> list[torch.Tensor]:
        self.workload.step()
        return self.take_gradients()

    def take_gradients(self) -> list[torch.Tensor]:
        found = []
        for parameter in self.workload.model.parameters():
            assert parameter.grad is not None, "every parameter of VGG-16 has a gradient"
            found.append(parameter.grad)
            parameter.grad = None
        return found

    def again(self) -> bool:
        """True if a second plain step has the same gradients. Otherwise a comparison would mean nothing."""
        return same_bits(self.plain, self._gradients())

    def under(self, policy: str, schedule: _C.Schedule, budget_bytes: int | None = None) -> _Run:
        machine = VirtualMachine("titan-x", fake=False, schedule=schedule)
        workload = self.workload
        with machine:
            machine.tracker.track((workload.model, workload.inputs))
            session = vdnn.offload(
                policy,
                budget=budget_bytes,
                device=machine,
                min_bytes=0,
                limits=vdnn.Limits(offload_window=OFFLOAD_WINDOW, reload_window=RELOAD_WINDOW),
                measure=True,
                integrity=True,
            )
            with session:
                gradients: list[torch.Tensor] = []
                for _ in range(STEPS):
                    gradients.clear()  # gradients of the previous step would count as resident in this one
                    workload.step()
                    gradients = self.take_gradients()
                    session.step()
            timeline = session.timeline
            session.close()
        assert timeline is not None, "the session measures steps after the warm-up"
        tracks = [[copy.nbytes for copy in timeline.copies if copy.track is track] for track in Track]
        copies = (len(tracks[0]), sum(tracks[0]), len(tracks[1]), sum(tracks[1]))
        return _Run(same_bits(self.plain, gradients), timeline.peak_bytes, copies)


def same_bits(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """True if float32 gradients have the same bits: 0.0 differs from -0.0, and a NaN equals itself."""
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(left, right, strict=True))


def compare_all(progress: Progress) -> list[IdentityFigures]:
    """Compare plain PyTorch again, the policies, and a budget halfway between the peaks of keep and vdnn-all."""
    progress.begin("gradients of a small VGG-16, plain")
    step = SameStep()
    again = step.again()
    rows = [IdentityFigures("plain PyTorch again", again, again, 0, 0, 0, 0)]
    peaks = {}
    for way in (KEEP, VDNN_ALL, VDNN_CONV):
        progress.begin(f"gradients of a small VGG-16, {way.name}")
        runs = [step.under(way.policy, schedule) for schedule in SCHEDULES]
        peaks[way] = runs[0].peak_bytes
        rows.append(_row(way.name, runs))
    budget_bytes = (peaks[KEEP] + peaks[VDNN_ALL]) // 2
    progress.begin("gradients of a small VGG-16, a budget")
    runs = [step.under("auto", schedule, budget_bytes) for schedule in SCHEDULES]
    rows.append(_row(f"budget {budget_bytes / 2**20:.1f} MiB", runs))
    return rows


def _row(name: str, runs: Sequence[_Run]) -> IdentityFigures:
    early, late = runs
    return IdentityFigures(name, early.identical, late.identical, *early.copies)


def render_identity(rows: Sequence[IdentityFigures]) -> str:
    header = ("way", "offloads", "MiB", "reloads", "MiB", "identical, copies early", "late")
    cells = [
        (
            row.name,
            str(row.offloaded),
            f"{row.to_host_bytes / 2**20:.2f}",
            str(row.reloaded),
            f"{row.to_device_bytes / 2**20:.2f}",
            "yes" if row.identical_early else "NO",
            "yes" if row.identical_late else "NO",
        )
        for row in rows
    ]
    remark = (
        f"Real tensors on this CPU: VGG-16, batch {BATCH} of {SIDE} x {SIDE} images, min_bytes=0, the third step. "
        "Identical: every gradient equals plain PyTorch's bit for bit. Copies run as early as allowed, then as late "
        "as allowed, with released memory overwritten; integrity=True found every storage unchanged after its reload. "
        "A budget is halfway between the peaks of keep and vdnn-all; weights and their gradients are most of both."
    )
    return render_table("6. Gradients of a small VGG-16", header, cells, [remark])
