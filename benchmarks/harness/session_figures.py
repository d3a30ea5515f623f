"""Reads the figures of a session's measured step into a cell, and saves the step's files for vdnn.report.

The prediction is simulated again from the recording: on a virtual machine with its card's costs, on a GPU with the
rates of the step's own copies.
"""

from __future__ import annotations

from pathlib import Path

import vdnn
from benchmarks.harness.cell_spec import CellSpec
from benchmarks.peers import Trial
from vdnn.planning.costs import LinkCosts, measured_costs, profile_costs
from vdnn.planning.simulate import simulate
from vdnn.report import Cell
from vdnn.runtime.storage.counters import Kept
from vdnn.step.timeline import Track

# For a link without a measured copy: PCIe gen 4, at the rates of large copies of pinned memory.
_ASSUMED_LINK = LinkCosts(24e9, 24e9, 42e9, 10_000)


def note_session(session: vdnn.Session, trial: Trial, spec: CellSpec, result: Cell) -> None:
    timeline, plan, recording = session.timeline, session.plan, session.recording
    result.host_bytes = session.host_bytes
    if timeline is not None:
        result.stall_ns = timeline.stall_ns
        result.to_host_bytes = timeline.copied_bytes(Track.TO_HOST)
        result.to_device_bytes = timeline.copied_bytes(Track.TO_DEVICE)
    if plan is not None and result.budget is not None and result.budget_bytes is None:
        result.budget_bytes = plan.budget_bytes
    predicted = None
    if plan is not None and recording is not None:
        machine = trial.machine
        if machine is not None:
            costs = profile_costs(machine.profile)
        else:
            costs = _ASSUMED_LINK if timeline is None else measured_costs(timeline, _ASSUMED_LINK)
        predicted = simulate(recording, plan, costs)
        result.predicted_step_ns, result.predicted_peak_bytes = predicted.step_ns, predicted.peak_bytes
    not_taken = session.counters.kept[Kept.HOST_FULL] + session.counters.kept[Kept.REFUSED]
    if not_taken:
        result.said = f"{not_taken} saves were kept for lack of host memory"
    if spec.run is None:
        return
    result.step = spec.step_name
    folder = Path(spec.run) / "steps" / spec.step_name
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"recording": recording, "plan": plan, "predicted": predicted, "measured": timeline}
    for name, part in parts.items():
        path = folder / f"{name}.json"
        if part is None:
            path.unlink(missing_ok=True)
        else:
            part.save(path)
