"""The sources of a run's numbers: devices, clocks, versions, commits, and how many were measured or predicted."""

from __future__ import annotations

from collections import Counter

from vdnn.report.cell import Cell
from vdnn.report.comparison import cells_of_run
from vdnn.report.run_folder import Run

_CLOCKS = {
    "device": "measured by the device's own clock",
    "host": "measured by the host's clock",
    "virtual": "virtual: computed from the figures of a card that was not present",
}


def provenance(run: Run) -> list[tuple[str, str]]:
    """Pairs of a name and a text, without empty texts."""
    cells = cells_of_run(run)
    found = [
        ("run", run.name),
        ("cells", f"{len(cells)}: {_counted(Counter(_kind(cell) for cell in cells))}" if cells else "none"),
        ("steps", str(len(run.steps))),
        ("devices", _joined({cell.device for cell in cells if cell.device})),
        ("commits", _joined({cell.commit for cell in cells if cell.commit})),
    ]
    versions: dict[str, set[str]] = {}
    for cell in cells:
        for name, version in cell.versions.items():
            versions.setdefault(name, set()).add(version)
    for step in run.steps:
        if step.recording is not None:
            versions.setdefault("torch", set()).add(step.recording.torch_version)
    found += [(name, _joined(versions[name])) for name in sorted(versions)]
    backends = {step.recording.backend for step in run.steps if step.recording is not None}
    found.append(("recorded on", _joined(backends)))
    return [(name, text) for name, text in found if text]


def _kind(cell: Cell) -> str:
    if cell.status != "ok":
        return f"{cell.status.replace('-', ' ')}"
    if cell.said.startswith("not run"):
        return "not run, but predicted by a recording or a plan"
    return _CLOCKS.get(cell.clock or "", "measured by an unnamed clock")


def _counted(kinds: Counter[str]) -> str:
    return "; ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def _joined(texts: set[str]) -> str:
    return ", ".join(sorted(texts))
