"""TrainingReport: the plan of a whole training for a user, its JSON form and its text."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from vdnn.bytesize import format_bytes
from vdnn.report.plan_text import NEEDS_SCIPY, aligned, certificate
from vdnn.step.json_form import load_file, save_text, to_json
from vdnn.step.timeline import host_sentence
from vdnn.step.training_plan import PlacedParameter, TrainingPlan

_FORM, _VERSION = "vdnn training plan", 1
_AT_THE_END = "after backward"  # the step time of most plans


@dataclass(frozen=True, slots=True)
class PlacedUnits:
    """Units that are alike and are placed alike. `names` has the first and how many more there are. Bytes are sums over
    these units; copied bytes are those of one step."""

    names: str
    count: int
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    saved_bytes: int
    activations: str
    parameters: str
    gradients: str
    optimizer: str
    to_device_bytes: int
    to_host_bytes: int


@dataclass(frozen=True, slots=True)
class TaskMemory:
    """The bytes on the device during one task of the cycle: the bytes it needs, by class, and copies in flight."""

    task: str
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int
    transient_bytes: int
    moving_bytes: int


@dataclass(frozen=True, slots=True)
class BusySpan:
    """One span in which one resource was busy, in nanoseconds of a step. `row`: "device", "to device", "to host"
    or "cpu"."""

    row: str
    name: str
    begin_ns: int
    end_ns: int
    memory_bytes: int  # of the host's memory, read and written


@dataclass(frozen=True, slots=True)
class RankShare:
    """The part of one of several ranks in the collectives of one step. Each card sends `bytes_per_s` while it
    receives as much. `waited_ns` is the part of `collective_ns` in which nothing is computed."""

    ranks: int
    shard: str  # "fsdp2" or "ddp"
    bytes_per_s: int
    gathered_bytes: int
    reduced_bytes: int
    collective_ns: int
    waited_ns: int


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """The plan of a whole training. One step is `micro_batches` passes of `batch`, and the optimizer's step.

    `computing_ns` is a step that waits for nothing and recomputes nothing, `bound_ns` the certified lower limit for all
    plans, or None. The host issues the step in `issue_ns`; 0 if nothing is known of it. `kept_peak_bytes` is the peak
    with everything on the device. `rehearsed_peak_bytes` is the measured peak of one pass with everything kept, and
    `cycle_peak_bytes` is the prediction of that peak by the plan's model. With a `rank`, these two peaks are those of
    one pass without ranks, and all other bytes and times are those of the rank with the most.
    """

    model: str
    batch: int | None
    micro_batches: int
    optimizer: str
    clips: bool
    hardware: str
    budget_bytes: int
    host_limit_bytes: int
    host_bytes_per_s: float
    cpu_bytes_per_s: float
    link_bytes_per_s: float
    allowed: tuple[str, ...]
    computing_ns: int
    step_ns: int
    bound_ns: int | None
    step_time: str
    slice_bytes: int
    peak_bytes: int
    kept_peak_bytes: int
    rehearsed_peak_bytes: int
    cycle_peak_bytes: int
    host_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    cpu_step_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    fixed_bytes: int
    units: tuple[PlacedUnits, ...]
    memory: tuple[TaskMemory, ...]
    spans: tuple[BusySpan, ...]
    notes: tuple[str, ...]
    plan_seconds: float
    rank: RankShare | None = None
    issue_ns: int = 0
    parameters: tuple[PlacedParameter, ...] = ()

    @property
    def plan(self) -> TrainingPlan:
        """Says what leaves the device of each parameter, for `vdnn.offload(plan=...)`."""
        return TrainingPlan(self.model, self.budget_bytes, self.parameters, self._not_followed())

    def _not_followed(self) -> str:
        """Why a session does not follow this plan."""
        if not self.parameters:
            return "it was saved by an earlier version of vdnn, without the names of parameters"
        if self.rank is not None:
            return "it is that of one of several ranks"
        if self.cpu_step_bytes or self.step_time != _AT_THE_END:
            return "its optimizer steps on the CPU, in backward or later, which a session does only when it is told"
        return ""

    @property
    def slowdown(self) -> float:
        """The time of a step over that of pure computing."""
        return self.step_ns / self.computing_ns if self.computing_ns else 1.0

    @property
    def gap(self) -> float | None:
        """The share by which the step is above the certified least, or None if it is not certified."""
        return None if self.bound_ns is None else self.step_ns / self.bound_ns - 1

    def save(self, path: str | os.PathLike[str]) -> None:
        save_text(to_json(self, _FORM, _VERSION), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> TrainingReport:
        return load_file(path, TrainingReport, _FORM, _VERSION)

    def as_json(self) -> dict[str, Any]:
        """All fields, with the name and the version of the form. Numbers in ns and bytes."""
        found: dict[str, Any] = json.loads(to_json(self, _FORM, _VERSION))
        return found

    def __str__(self) -> str:
        lines = [
            self._heading(),
            *self._memory_lines(),
            *self._time_lines(),
            *self._rank_lines(),
            "",
            units_table(self.units),
        ]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _heading(self) -> str:
        batch = "" if self.batch is None else f", batch {self.batch}"
        passes = f" x {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        clipping = ", clipped by the norm" if self.clips else ""
        ranks = "" if self.rank is None else f", each of {self.rank.ranks} ranks under {self.rank.shard}"
        return f"{self.model}{batch}{passes}, {self.optimizer}{clipping}, on {self.hardware}{ranks}: the whole training"

    def _memory_lines(self) -> list[str]:
        held = (
            ("parameters", self.parameter_bytes),
            ("gradients", self.gradient_bytes),
            ("optimizer state", self.state_bytes),
            ("always on the device", self.fixed_bytes),
        )
        difference = 100 * (self.cycle_peak_bytes / self.rehearsed_peak_bytes - 1)
        return [
            "  memory: " + ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in held if nbytes),
            f"  everything on the device: peak {format_bytes(self.kept_peak_bytes)}; "
            f"one pass was rehearsed with {format_bytes(self.rehearsed_peak_bytes)}, and is planned with "
            f"{difference:.2f} % more",
            f"  the plan: peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)}, "
            f"host memory {format_bytes(self.host_bytes)} of {format_bytes(self.host_limit_bytes)}",
        ]

    def _rank_lines(self) -> list[str]:
        if self.rank is None:
            return []
        one = self.rank
        gathered = f"gathers {format_bytes(one.gathered_bytes)} and " if one.gathered_bytes else ""
        return [
            f"  each rank {gathered}reduces {format_bytes(one.reduced_bytes)} in {_ms(one.collective_ns)}, at "
            f"{one.bytes_per_s / 1e9:.0f} GB/s between cards; it waits for that {_ms(one.waited_ns)}"
        ]

    def _time_lines(self) -> list[str]:
        copied = self.to_device_bytes + self.to_host_bytes
        certified = NEEDS_SCIPY if self.gap is None else certificate(self.gap, "with these freedoms")
        is_bound = self.issue_ns >= self.step_ns
        memory_share = (copied + self.cpu_step_bytes) / self.host_bytes_per_s * 1e9 / self.step_ns
        return [
            f"  step {_ms(self.step_ns)}, {self.slowdown:.3f} x of pure computing ({_ms(self.computing_ns)}); "
            f"planned in {self.plan_seconds:.2f} s",
            *(
                [f"  {host_sentence(_ms(self.issue_ns), self.issue_ns, self.step_ns, is_bound=is_bound)}"]
                if self.issue_ns
                else []
            ),
            f"  {certified}",
            f"  the optimizer steps {self.step_time}; allowed beyond moving bytes: "
            f"{', '.join(self.allowed) or 'nothing (exact)'}",
            f"  each step: {format_bytes(self.to_device_bytes)} to the device, {format_bytes(self.to_host_bytes)} to "
            f"the host; the host's memory is busy {100 * memory_share:.0f} % of the time",
        ]


def units_table(units: tuple[PlacedUnits, ...]) -> str:
    """A table of the places of all units' bytes, and of the bytes that cross the link in one step."""
    header = ("units", "parameters", "gradients", "optimizer state", "activations", "to device", "to host")
    rows = [header]
    for one in units:
        rows.append(
            (
                one.names,
                _placed(one.parameters, one.parameter_bytes),
                _placed(one.gradients, one.gradient_bytes),
                _placed(one.optimizer, one.state_bytes if one.gradient_bytes else 0),
                _placed(one.activations, one.saved_bytes),
                format_bytes(one.to_device_bytes) if one.to_device_bytes else "-",
                format_bytes(one.to_host_bytes) if one.to_host_bytes else "-",
            )
        )
    return aligned(rows, left=range(len(header)), indent="  ")


def batch_table(reports: dict[int, TrainingReport | str]) -> str:
    """One row for each batch: a report, or why there is no plan."""
    header = ("batch", "peak", "host", "step", "of computing", "above bound")
    rows = [header]
    for batch, report in reports.items():
        if isinstance(report, str):
            rows.append((str(batch), report, "", "", "", ""))
            continue
        gap = "" if report.gap is None else f"{100 * report.gap:.1f} %"
        rows.append(
            (
                str(batch),
                format_bytes(report.peak_bytes),
                format_bytes(report.host_bytes),
                _ms(report.step_ns),
                f"{report.slowdown:.3f} x",
                gap,
            )
        )
    return aligned(rows, left=(), indent="  ", measured=[row for row in rows if row[2]])


def _placed(place: str, nbytes: int) -> str:
    return f"{place}, {format_bytes(nbytes)}" if nbytes else "-"


def _ms(time_ns: int) -> str:
    return f"{time_ns / 1e6:,.1f} ms"
