"""CellSpec, which says what a cell runs (a workload, a peer, a budget and a place), and CellResult, its line of JSON.

Fields that do not apply are None. vdnn.report reads the line, and ignores fields that it does not know.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.harness.synthetic_data import DataOptions

FORMAT = 1
OK, OUT_OF_MEMORY, FAILED, NOT_RUN, TIMED_OUT = "ok", "out-of-memory", "failed", "not-run", "timed-out"
STATUSES = (OK, OUT_OF_MEMORY, FAILED, NOT_RUN, TIMED_OUT)

# Workload, batch, peer, budget, place and hardware. Of two results with the same key the later one counts.
CellKey = tuple[str, int | None, str, str | None, str, str]


@dataclass(frozen=True, slots=True)
class CellSpec:
    """One cell to run.

    `budget` is text such as "60%" (of plain's peak), "=checkpoint" (the peak of that peer), "12GiB" or "min".
    `budget_bytes` is its size; None if that is unknown before the run. With `batch` None the workload's own batch is
    used. `run` is the folder for the step's files.
    """

    workload: str
    peer: str
    place: str
    hardware: str
    budget: str | None = None
    budget_bytes: int | None = None
    batch: int | None = None
    steps: int = 5
    run: str | None = None
    data: DataOptions = field(default_factory=DataOptions)

    @property
    def key(self) -> CellKey:
        return self.workload, self.batch, self.peer, self.budget, self.place, self.hardware

    @property
    def as_low_as(self) -> str | None:
        """The peer whose peak is the budget, or None."""
        return self.budget[1:] if self.budget is not None and self.budget.startswith("=") else None

    @property
    def step_name(self) -> str:
        """The name of the step's folder, different for each cell of a run."""
        parts = (self.workload, f"b{self.batch}" if self.batch else "", self.peer, self.budget or "", self.place)
        where = "" if self.place == "cuda" else self.hardware
        name = "-".join(part for part in (*parts, where) if part)
        return name.replace("%", "pct").replace("=", "as-").replace(":", "_").replace("/", "_")

    def __str__(self) -> str:
        return f"{self.workload}, {self.peer}{f' at {self.budget}' if self.budget else ''}"


@dataclass(slots=True)
class CellResult:
    """The result of one cell. `asked` is the peer's name in PEERS; several may share one `peer`: the compiled plain is
    "plain", too. If a cell did not run, `said` tells why."""

    workload: str
    peer: str
    asked: str
    place: str
    hardware: str
    batch: int | None = None
    budget: str | None = None
    budget_bytes: int | None = None
    device: str = ""
    clock: str | None = None
    status: str = OK
    said: str = ""
    step_ns: int | None = None
    step_times_ns: list[int] = field(default_factory=list)
    peak_bytes: int | None = None
    requested_bytes: int | None = None
    reserved_bytes: int | None = None
    host_bytes: int | None = None
    to_host_bytes: int | None = None
    to_device_bytes: int | None = None
    stall_ns: int | None = None
    predicted_step_ns: int | None = None
    predicted_peak_bytes: int | None = None
    loss: float | None = None
    gradients: str | None = None
    identical: bool | None = None
    deterministic: bool | None = None
    compiled: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    step: str | None = None

    @property
    def is_measured(self) -> bool:
        return self.step_ns is not None and self.peak_bytes is not None

    def as_fields(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def key_of(fields: dict[str, Any]) -> CellKey:
    """The key of a line of results."""
    return (
        fields["workload"],
        fields["batch"],
        fields["asked"],
        fields["budget"],
        fields["place"],
        fields["hardware"],
    )


def result_of(spec: CellSpec, **fields: Any) -> CellResult:
    """A result with the fields of `spec`, and `fields`."""
    return CellResult(
        workload=spec.workload,
        peer=spec.peer,
        asked=spec.peer,
        place=spec.place,
        hardware=spec.hardware,
        batch=spec.batch,
        budget=spec.budget,
        budget_bytes=spec.budget_bytes,
        **fields,
    )
