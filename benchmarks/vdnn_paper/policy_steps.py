"""Runs training steps of VGG-16 under each policy, in virtual time on the card of the vDNN paper.

The steps are unmodified and have no data. Their figures depend only on the calls, and are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import vdnn
from benchmarks.models import vgg16
from benchmarks.progress import Progress
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.step.timeline import Timeline, Track

HARDWARE = "titan-x"
BATCHES = (64, 128, 256)
# One step to warm up, one that is recorded, one that follows the plan if there is a budget. The last one counts.
STEPS = 3


@dataclass(frozen=True, slots=True)
class Way:
    """The arguments of vdnn.offload for one way."""

    name: str
    policy: str
    budget: str | None = None


KEEP = Way("keep", "keep")
VDNN_ALL = Way("vdnn-all", "vdnn-all")
VDNN_CONV = Way("vdnn-conv", "vdnn-conv")
BUDGET = Way("budget 12 GiB", "auto", budget="12GiB")
# Keep is first, because the others are compared with it.
WAYS = (KEEP, VDNN_ALL, VDNN_CONV, BUDGET)


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """The figures of one step, measured in virtual time. `keep_ns` is the time of the step with everything kept."""

    batch: int
    way: Way
    device_bytes: int
    peak_bytes: int
    step_ns: int
    keep_ns: int
    to_host_bytes: int
    to_device_bytes: int
    release_stall_ns: int
    reload_stall_ns: int

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.device_bytes

    @property
    def slowdown(self) -> float:
        return self.step_ns / self.keep_ns


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The figures of a step, and the timeline from which they were read."""

    figures: PolicyFigures
    timeline: Timeline


def step_of(batch: int, way: Way) -> tuple[Timeline, int]:
    """The timeline of a step, and the memory of the device in bytes."""
    with VirtualMachine(HARDWARE) as machine:
        workload = vgg16(batch)
        with vdnn.offload(way.policy, budget=way.budget, device=machine, measure=True, warmup_steps=1) as session:
            for _ in range(STEPS):
                workload.step()
                session.step()
                workload.model.zero_grad(set_to_none=True)
        timeline = session.timeline
        session.close()
    assert timeline is not None, "the session measures steps after the warm-up"
    return timeline, machine.profile.memory_bytes


def measure_steps(batches: Sequence[int], progress: Progress) -> list[MeasuredStep]:
    """Measure every way at every batch. The first way keeps everything."""
    found = []
    for batch in batches:
        keep_ns = 0
        for way in WAYS:
            progress.begin(f"VGG-16 ({batch}), {way.name}")
            timeline, device_bytes = step_of(batch, way)
            keep_ns = keep_ns or timeline.step_ns
            found.append(MeasuredStep(_figures(batch, way, timeline, device_bytes, keep_ns), timeline))
    return found


def _figures(batch: int, way: Way, timeline: Timeline, device_bytes: int, keep_ns: int) -> PolicyFigures:
    return PolicyFigures(
        batch=batch,
        way=way,
        device_bytes=device_bytes,
        peak_bytes=timeline.peak_bytes,
        step_ns=timeline.step_ns,
        keep_ns=keep_ns,
        to_host_bytes=timeline.copied_bytes(Track.TO_HOST),
        to_device_bytes=timeline.copied_bytes(Track.TO_DEVICE),
        release_stall_ns=timeline.release_stall_ns,
        reload_stall_ns=timeline.reload_stall_ns,
    )
