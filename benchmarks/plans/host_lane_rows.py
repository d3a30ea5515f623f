"""The steps that were measured on an H200, beside what a rehearsal predicts with the host lane.

    python -m benchmarks.plans.host_lane_rows

The rows are those of benchmarks/results/gpu_steps.txt that are planned, of GPT-2 and ResNet-50. None of them gave a
figure. The times of the host are those of the runtime that was measured then; where they come from:

operation, launch   of the H200's profile: the time in which a *plain* step of GPT-2 was issued there (36 ms)
save, copy,         host_time_before.json, on one core of an EPYC, of the same runtime: settled steps of GPT-2 and
recompute           ResNet-50 over plain, as 14.1 us a save and its use, 15 us a copy and 253 us a recompute beside its
                    operations (37 us there)
times 1.79          the H200's host beside that core: a step of ResNet-50 at 75 % took it 36.0 ms to issue
                    (gpu_first_steps.txt), 16.9 over its operations; the EPYC took 9.46 over plain

The device's times are those of the rehearsal, and once more scaled so that the plain step takes the measured time:
what a rehearsal knows of the card is not the question here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import benchmarks.models as models
from benchmarks.models.mixed_precision import mixed
from benchmarks.models.workload import Workload
from benchmarks.text_table import render_table
from vdnn.hardware import HostFigures, load_profile
from vdnn.planning.costs import LinkCosts, profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.planning.simulate import simulate
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of
from vdnn.step.recording import Lifetime, Recording

_CARD = "h200"
_THEN = HostFigures(operation_ns=19_900, launch_ns=3_000, save_ns=25_300, copy_ns=26_900, recompute_ns=453_000)


class Measured(NamedTuple):
    """A model of gpu_steps.txt: its plain step in ms, and by share of the plain peak its planned steps in ms."""

    name: str
    make: Callable[[int], Workload]
    batch: int
    plain_ms: float
    steps: Sequence[tuple[str, float, float]]


MEASURED = (
    Measured(
        "GPT-2",
        mixed(models.gpt2),
        16,
        67.54,
        (("90 %", 0.90, 67.67), ("75 %", 0.75, 71.09), ("checkpoint's peak", 0.656, 120.27)),
    ),
    Measured(
        "ResNet-50",
        models.resnet50,
        128,
        59.56,
        (("90 %", 0.90, 60.68), ("75 %", 0.75, 61.12), ("checkpoint's peak", 0.4324, 74.00)),
    ),
)


def scaled(recording: Recording, factor: float) -> Recording:
    """The recording on a device that takes `factor` times as long."""

    def lifetime(one: Lifetime) -> Lifetime:
        if one.recompute is None:
            return one
        compute_ns, discard_ns = (round(ns * factor) for ns in (one.recompute.compute_ns, one.recompute.discard_ns))
        return replace(one, recompute=replace(one.recompute, compute_ns=compute_ns, discard_ns=discard_ns))

    points = tuple(replace(point, compute_ns=round(point.compute_ns * factor)) for point in recording.points)
    return replace(recording, points=points, lifetimes=tuple(map(lifetime, recording.lifetimes)))


class Predicted(NamedTuple):
    """The plan without the lane, as it was measured: on the device alone and under the host; and the plan with it."""

    device_ns: int
    step_ns: int
    host_ns: int
    recomputes: int
    with_ns: int
    with_recomputes: int


def predicted(recording: Recording, costs: LinkCosts, share: float) -> Predicted:
    budget = max(least_bytes(recording), round(share * recording.peak_bytes))
    without = plan_step(recording.without_host(), costs.without_host(), budget)
    timeline = simulate(recording, without.plan, costs)
    planned = plan_step(recording, costs, budget)
    counts = [sum(one.is_recomputed for one in plan.lifetimes) for plan in (without.plan, planned.plan)]
    return Predicted(
        without.timeline.step_ns,
        timeline.step_ns,
        timeline.host_ns,
        counts[0],
        planned.timeline.step_ns,
        counts[1],
    )


def rows() -> Iterator[tuple[str, ...]]:
    profile = load_profile(_CARD)
    costs = profile_costs(profile, _THEN)
    for one in MEASURED:
        recorded = rehearse(subject_of(one.make, one.batch), profile, host=_THEN).recording
        plain = one.plain_ms * 1e6 / recorded.compute_ns
        for device, recording in (("rehearsed", recorded), ("plain's", scaled(recorded, plain))):
            for label, share, measured_ms in one.steps:
                found = predicted(recording, costs, share)
                yield (
                    f"{one.name}, {label}, {device}",
                    f"{measured_ms:.2f} ms",
                    *(f"{ns / 1e6:.2f} ms" for ns in (found.device_ns, found.step_ns, found.host_ns)),
                    *(f"{100 * (ns / 1e6 / measured_ms - 1):+.1f} %" for ns in (found.device_ns, found.step_ns)),
                    str(found.recomputes),
                    f"{found.with_ns / 1e6:.2f} ms",
                    str(found.with_recomputes),
                )


_HEADER = ("row, device", "measured", "device", "lane", "host", "off", "off", "recomputes", "planned", "recomputes")
_REMARKS = (
    "Device: the step predicted on a host that takes no time, and off by how much. Lane: the same plan with the host "
    "lane, and off by how much; host: the time in which it is issued. Planned: the plan that the search makes with the "
    "lane, and its recomputes. All on the host and with the runtime that were measured.",
)


def main() -> int:
    print(render_table("Steps measured on an H200, and a rehearsal's", _HEADER, list(rows()), _REMARKS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
