"""Cell: the result of one peer that trained one workload on one device. One line of a benchmark's results.

Benchmarks fill it in while they measure; tables, claims and reports read it. Fields that do not apply are None. Unknown
fields are ignored, so that the results of a newer benchmark can be read. A field of the wrong type is refused by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vdnn.errors import FormatError

FORMAT = 1
OK, OUT_OF_MEMORY, FAILED, NOT_RUN, TIMED_OUT = "ok", "out-of-memory", "failed", "not-run", "timed-out"
STATUSES = (OK, OUT_OF_MEMORY, FAILED, NOT_RUN, TIMED_OUT)
PLACES = ("cuda", "sim", "virtual")
OWN_PEERS = ("vdnn", "vdnn-auto")
CLOCKS = ("device", "host", "virtual")


@dataclass(slots=True)
class Cell:
    """One cell of a run.

    `peer` is the way of training, such as "plain", "checkpoint" or "vdnn-auto". `hardware` is the profile of the card
    that was requested. `step_ns` is the median of `step_times_ns`. `requested_bytes` is the peak before an allocator
    rounds. `said` tells why a status is not "ok". `gradients` is a digest of those of the last timed step. `identical`
    is True if they equal those of plain, and `deterministic` if another step of the cell had the same. `compiled` cells
    are compared with the compiled plain. `step` names the folder with the step's own files.
    """

    workload: str
    peer: str
    status: str = OK
    batch: int | None = None
    budget: str | None = None
    budget_bytes: int | None = None
    place: str | None = None
    hardware: str = ""
    device: str = ""
    clock: str | None = None
    said: str = ""
    step_ns: int | None = None
    step_times_ns: tuple[int, ...] = ()
    peak_bytes: int | None = None
    requested_bytes: int | None = None
    reserved_bytes: int | None = None
    host_bytes: int | None = None
    to_host_bytes: int | None = None
    to_device_bytes: int | None = None
    stall_ns: int | None = None
    predicted_step_ns: int | None = None
    predicted_peak_bytes: int | None = None
    loss: str | None = None
    gradients: str | None = None
    identical: bool | None = None
    deterministic: bool | None = None
    compiled: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    step: str | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """A later cell with the same identity replaces an earlier one."""
        return self.workload, self.batch, self.peer, self.budget, self.place, self.device, self.clock, self.compiled

    @property
    def is_vdnn(self) -> bool:
        """True for vdnn's own planner. The published policies that vdnn can follow are peers."""
        return self.peer in OWN_PEERS

    @property
    def budget_text(self) -> str:
        """The budget as people read it: "60 %", "least", and "peak of checkpoint" for "=checkpoint"."""
        budget = self.budget or ""
        if budget.startswith("="):
            return f"peak of {budget[1:]}"
        return "least" if budget == "min" else budget.replace("%", " %").replace("  %", " %")

    @property
    def is_plain(self) -> bool:
        return self.peer == "plain"

    @property
    def is_measured(self) -> bool:
        """True if the cell ran, and both its time and its memory are known."""
        return self.status == OK and bool(self.step_ns) and bool(self.peak_bytes)


def cell_from_json(fields: object, where: str) -> Cell:
    """Read a cell from a JSON object. `where` names the line in error messages."""
    if not isinstance(fields, dict):
        raise FormatError(where=where, problem=f"expected a JSON object, got {_shown(fields)}.")
    if fields.get("format", FORMAT) != FORMAT:
        raise FormatError(
            where=where,
            problem=f"expected cells of format {FORMAT}, which this vdnn reads, got {_shown(fields['format'])}: read "
            "them with the vdnn that wrote them.",
        )
    values = {}
    for name, read in _READERS.items():
        if fields.get(name) is not None:
            values[name] = read(fields[name], f"{where}: {name}")
        elif name in ("workload", "peer", "status"):
            raise FormatError(where=where, problem=f"{name}: expected text, but the field is missing.")
    return Cell(**values)


def cell_as_json(cell: Cell) -> dict[str, Any]:
    return {"format": FORMAT, **dataclasses.asdict(cell)}


def _text(found: object, where: str) -> str:
    if not isinstance(found, str):
        raise FormatError(where=where, problem=f"expected text, got {_shown(found)}.")
    return found


def _one_of(known: tuple[str, ...]) -> Callable[[object, str], str]:
    def read(found: object, where: str) -> str:
        if not isinstance(found, str) or found not in known:
            raise FormatError(
                where=where, problem=f"expected one of {', '.join(map(repr, known))}, got {_shown(found)}."
            )
        return found

    return read


def _count(found: object, where: str) -> int:
    """A whole number. Rounds, because a median may lie between two whole numbers."""
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found) or found < 0:
        raise FormatError(where=where, problem=f"expected a number, 0 or more, got {_shown(found)}.")
    return round(found)


def _counts(found: object, where: str) -> tuple[int, ...]:
    if not isinstance(found, list):
        raise FormatError(where=where, problem=f"expected a list of numbers, got {_shown(found)}.")
    return tuple(_count(one, f"{where}[{index}]") for index, one in enumerate(found))


def _truth(found: object, where: str) -> bool:
    if not isinstance(found, bool):
        raise FormatError(where=where, problem=f"expected true or false, got {_shown(found)}.")
    return found


def _number_or_text(found: object, where: str) -> str:
    if isinstance(found, bool) or not isinstance(found, (int, float, str)):
        raise FormatError(where=where, problem=f"expected a number or text, got {_shown(found)}.")
    return found if isinstance(found, str) else repr(found)


def _texts(found: object, where: str) -> dict[str, str]:
    if not isinstance(found, dict):
        raise FormatError(where=where, problem=f"expected an object of names and versions, got {_shown(found)}.")
    return {name: "none" if one is None else _number_or_text(one, f"{where}.{name}") for name, one in found.items()}


def _shown(found: object) -> str:
    """The repr of a value, cut off if it is long."""
    text = repr(found)
    return text if len(text) <= 60 else f"{text[:57]}..."


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "workload": _text,
    "peer": _text,
    "status": _one_of(STATUSES),
    "batch": _count,
    "budget": _number_or_text,
    "budget_bytes": _count,
    "place": _one_of(PLACES),
    "hardware": _text,
    "device": _text,
    "clock": _one_of(CLOCKS),
    "said": _text,
    "step_ns": _count,
    "step_times_ns": _counts,
    "peak_bytes": _count,
    "requested_bytes": _count,
    "reserved_bytes": _count,
    "host_bytes": _count,
    "to_host_bytes": _count,
    "to_device_bytes": _count,
    "stall_ns": _count,
    "predicted_step_ns": _count,
    "predicted_peak_bytes": _count,
    "loss": _number_or_text,
    "gradients": _text,
    "identical": _truth,
    "deterministic": _truth,
    "compiled": _truth,
    "versions": _texts,
    "commit": _text,
    "step": _text,
}
