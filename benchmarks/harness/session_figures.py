"""Reads the figures of a session's measured step into a cell, and saves the step's files for vdnn.report.

The prediction is simulated again from the recording: on a virtual machine with its card's costs, on a GPU with the
rates of the step's own copies, and where it has none in a direction, with those of the probed link.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import vdnn
from benchmarks.harness.cell_spec import CellSpec
from benchmarks.peers import Trial
from vdnn import _C
from vdnn.errors import VdnnError
from vdnn.hardware.link_probe import measure_link
from vdnn.planning.costs import LinkCosts, measured_costs, profile_costs
from vdnn.planning.simulate import simulate
from vdnn.report import Cell
from vdnn.runtime.storage.counters import Kept
from vdnn.step.timeline import Track

# For a link that cannot be probed: PCIe gen 4, at the rates of large copies of pinned memory.
_ASSUMED_LINK = LinkCosts(24e9, 24e9, 42e9, 10_000)
_PROBES = 3


def probed_link(open_device: Callable[[], _C.Device]) -> LinkCosts:
    """The costs of a link, measured with a few blocks, or assumed where there is no memory for those."""
    try:
        device = open_device()
        try:
            found = measure_link(device, repeats=_PROBES)
        finally:
            device.close()
    except (VdnnError, RuntimeError):
        return _ASSUMED_LINK
    to_host, to_device = found.to_host_bytes_per_s, found.to_device_bytes_per_s
    duplex = max(to_host, to_device, found.both_ways_bytes_per_s)
    return LinkCosts(to_host, to_device, duplex, _ASSUMED_LINK.latency_ns)


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
            link = probed_link(lambda: _C.CudaDevice(torch.cuda.current_device()))
            costs = link if timeline is None else measured_costs(timeline, link)
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
