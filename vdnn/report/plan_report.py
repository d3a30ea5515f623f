"""PlanReport: the result of planning a step, its JSON form and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vdnn.bytesize import format_bytes
from vdnn.planning.memory_kinds import MemoryKinds
from vdnn.planning.planned_step import PlannedStep
from vdnn.planning.second_best import StorageChoice
from vdnn.report.explanation import choices_as_json, explanation
from vdnn.report.plan_text import aligned, certificate
from vdnn.step.plan import Action
from vdnn.step.timeline import Timeline, Track, host_sentence

_STAND_INS_SHOWN = 5
# Two networks under three budgets on an H200 reserved 0 to 9 % more: tests/runtime/rehearsal/test_reserved.py.
RESERVED_MORE = 0.1


@dataclass(frozen=True, slots=True)
class LibraryMemory:
    """The memory of libraries on the card. `workspace_bytes` is the upper figure of the largest workspace, `workspace`
    names it; it and `cublas_bytes` are part of all peaks. `context_bytes` is what CUDA takes beside the budget. A zero
    is not known, or there is none. Torch's allocator reserves `reserved_bytes` in a run under the plan, and
    `reserved_expandable_bytes` with expandable segments; both are None without a run."""

    workspace_bytes: int
    workspace: str
    cublas_bytes: int
    context_bytes: int
    reserved_bytes: int | None = None
    reserved_expandable_bytes: int | None = None
    card_bytes: int | None = None

    @property
    def reservation(self) -> str:
        """The memory that torch reserves, and a warning if the card has less. Empty if it is not known."""
        fixed, expandable, card = self.reserved_bytes, self.reserved_expandable_bytes, self.card_bytes
        if fixed is None or expandable is None:
            return ""
        said = (
            f"torch reserves {format_bytes(fixed)} for the run, {format_bytes(expandable)} with expandable segments; "
            f"on a card it reserved up to {RESERVED_MORE:.0%} more than such a replay"
        )
        if card is None or (1 + RESERVED_MORE) * fixed + self.context_bytes <= card:
            return said
        room = (1 + RESERVED_MORE) * expandable + self.context_bytes <= card
        way_out = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" if room else "a smaller budget leaves room"
        return f"{said}. WARNING: the card has {format_bytes(card)}, and may run out of memory: {way_out}"

    def __str__(self) -> str:
        parts = []
        if self.workspace_bytes:
            parts.append(f"peaks include workspaces, the largest up to {self.workspace}")
        if self.cublas_bytes:
            parts.append(f"{'' if parts else 'peaks include '}{format_bytes(self.cublas_bytes)} that cuBLAS keeps")
        if self.context_bytes:
            parts.append(f"CUDA's context takes up to {format_bytes(self.context_bytes)} beside the budget")
        return f"libraries: {'; '.join(parts)}" if parts else ""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The result of planning one step.

    `executed` is the same step run under the plan, in virtual time or on a device; in virtual time it is that of the
    device alone, whose operations no host has to issue. `advice` has sentences for the user about this plan, if there
    are any. `storages` has the reasons for the actions of the largest storages. `stand_ins` names each answer that the
    rehearsed step got in place of a value that depends on data. `libraries` is the memory of libraries.
    """

    model: str
    batch: int | None
    hardware: str
    planned: PlannedStep
    memory: MemoryKinds
    executed: Timeline | None = None
    advice: str | None = None
    storages: tuple[StorageChoice, ...] = ()
    stand_ins: tuple[str, ...] = ()
    libraries: LibraryMemory = LibraryMemory(0, "", 0, 0)

    @property
    def shown(self) -> Timeline:
        """The executed step, or the predicted one if the host makes it longer than the device alone."""
        predicted = self.planned.timeline
        return predicted if self.executed is None or predicted.host_stall_ns else self.executed

    @property
    def host_bytes(self) -> int:
        """The most pinned memory that the plan can need: the bytes of all offloaded storages."""
        return sum(one.nbytes for one in self.planned.plan.lifetimes if one.action is Action.OFFLOAD)

    def as_json(self) -> dict[str, Any]:
        """Numbers in ns and bytes, as documented in docs/planning.md."""
        planned = self.planned
        executed = self.executed
        return {
            "model": self.model,
            "batch": self.batch,
            "hardware": self.hardware,
            "backend": planned.recording.backend,
            "budget_bytes": planned.plan.budget_bytes,
            "policy": planned.plan.policy,
            "plan_seconds": round(planned.plan_seconds, 3),
            "memory": asdict(self.memory),
            "libraries": asdict(self.libraries),
            "predicted": {
                "baseline_ns": planned.recording.kept_ns,
                "step_ns": planned.timeline.step_ns,
                "host_ns": planned.timeline.host_ns if planned.recording.has_host else None,
                "host_stall_ns": planned.timeline.host_stall_ns,
                "bound_ns": None if planned.bound is None else planned.bound.step_ns,
                "peak_bytes": planned.timeline.peak_bytes,
                "host_bytes": self.host_bytes,
            },
            "executed": {
                "step_ns": None if executed is None else executed.step_ns,
                "peak_bytes": None if executed is None else executed.peak_bytes,
            },
            "actions": {
                action.name: [
                    sum(one.action is action for one in planned.plan.lifetimes),
                    sum(one.nbytes for one in planned.plan.lifetimes if one.action is action),
                ]
                for action in Action
            },
            **({"storages": choices_as_json(self.storages)} if self.storages else {}),
            **({"stand_ins": list(self.stand_ins)} if self.stand_ins else {}),
        }

    def __str__(self) -> str:
        planned, recording = self.planned, self.planned.recording
        memory = self.memory
        kinds = ", ".join(
            f"{name.replace('_', ' ')} {format_bytes(nbytes)}"
            for name, nbytes in asdict(memory).items()
            if name != "floor" and nbytes
        )
        batch = "" if self.batch is None else f", batch {self.batch}"
        lines = [
            f"{self.model}{batch}, on {self.hardware} ({recording.backend})",
            f"  memory: {kinds}",
            f"  everything kept: peak {format_bytes(recording.peak_bytes)}, "
            f"step {_ms(recording.kept_ns)}; the least any plan reaches is {format_bytes(memory.floor)}",
            f"  {planned.plan.policy}, budget {_budget(planned)}: peak {format_bytes(planned.timeline.peak_bytes)}"
            f"{'' if planned.fits else ' (OVER THE BUDGET)'}, step {_ms(planned.timeline.step_ns)}, "
            f"{100 * (planned.slowdown - 1):.1f} % slower; planned in {planned.plan_seconds:.2f} s",
            f"  {_host(planned, self.hardware)}",
            f"  {_certificate(planned)}",
            f"  the peak is at {planned.peak_place}",
            f"  copies: {format_bytes(planned.timeline.copied_bytes(Track.TO_HOST))} offloaded, "
            f"{format_bytes(planned.timeline.copied_bytes(Track.TO_DEVICE))} reloaded; "
            f"pinned host memory {format_bytes(self.host_bytes)}",
        ]
        if self.executed is not None:
            lines.append(
                f"  run in virtual time{', the device alone' if planned.timeline.host_stall_ns else ''}: "
                f"step {_ms(self.executed.step_ns)}, "
                f"peak {format_bytes(self.executed.peak_bytes)}"
            )
        if str(self.libraries):
            lines.append(f"  {self.libraries}")
        if self.libraries.reservation:
            lines.append(f"  {self.libraries.reservation}")
        if self.advice is not None:
            lines.append(f"  note: {self.advice}")
        if self.stand_ins:
            lines.append("  the step asked for values that depend on data, and went on with stand-ins:")
            lines += [f"    {one}" for one in self.stand_ins[:_STAND_INS_SHOWN]]
            if len(self.stand_ins) > _STAND_INS_SHOWN:
                lines.append(f"    and {len(self.stand_ins) - _STAND_INS_SHOWN} more (--json names all)")
        if self.storages:
            lines += ["", "the largest storages, and the reasons for their actions:", explanation(self.storages)]
        return "\n".join(lines)


def comparison(reports: Sequence[PlanReport]) -> str:
    """A table of the same step under several policies, one row for each."""
    header = ("policy", "peak", "fits", "step ms", "slower", "above bound", "offloaded", "reloaded", "planned in")
    rows = [header]
    for report in reports:
        planned = report.planned
        bound = planned.bound
        rows.append(
            (
                planned.plan.policy,
                format_bytes(planned.timeline.peak_bytes),
                "yes" if planned.fits else "NO",
                f"{planned.timeline.step_ns / 1e6:.1f}",
                f"{100 * (planned.slowdown - 1):.1f} %",
                "" if bound is None or not planned.fits else f"{100 * bound.gap(planned.timeline.step_ns):.1f} %",
                format_bytes(planned.timeline.copied_bytes(Track.TO_HOST)),
                format_bytes(planned.timeline.copied_bytes(Track.TO_DEVICE)),
                f"{planned.plan_seconds:.2f} s",
            )
        )
    return aligned(rows, left=(0,))


def _ms(time_ns: int) -> str:
    return f"{time_ns / 1e6:.2f} ms"


def _budget(planned: PlannedStep) -> str:
    budget_bytes = planned.plan.budget_bytes
    return "none" if budget_bytes is None else format_bytes(budget_bytes)


def _host(planned: PlannedStep, hardware: str) -> str:
    timeline = planned.timeline
    if not planned.recording.has_host:
        return f"host: the profile {hardware} has no figures of one, so times are those of the device alone"
    is_bound = timeline.is_bound_by_host
    waited = f"{', and' if is_bound else ';'} the device waits for it for {_ms(timeline.host_stall_ns)}"
    if not is_bound and not timeline.host_stall_ns:
        waited = ""
    return host_sentence(_ms(timeline.host_ns), timeline.host_ns, timeline.step_ns, is_bound=is_bound, waited=waited)


def _certificate(planned: PlannedStep) -> str:
    bound = planned.bound
    if bound is None:
        return certificate(None, "")
    return certificate(bound.gap(planned.timeline.step_ns), "under this budget", f" ({_ms(bound.step_ns)} or more)")
