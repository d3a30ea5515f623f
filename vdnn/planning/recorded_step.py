"""The native core's forms of a Recording and of the costs of copies.

[Note: Native planning] Whatever is computed for a step is computed by the native core (csrc/planning): the step with
recomputes, its gaps, its bytes, the timeline of a plan, and the search for plans. It is native because a search does it
thousands of times and a training waits for its plans. The readable forms are in tests/planning/reference, and tests
compare the two.
"""

from __future__ import annotations

from vdnn import _C
from vdnn.planning.costs import LinkCosts
from vdnn.step.recording import Recording


def recorded_step(recording: Recording) -> _C.RecordedStep:
    """The recording in the native core, which reads it once."""
    known = getattr(recording, "kept", None)
    if isinstance(known, _C.RecordedStep):
        return known
    step = _C.RecordedStep(recording)
    keep_step(recording, step)
    return step


def keep_step(recording: Recording, step: _C.RecordedStep) -> None:
    """Notes that `step` is this recording in the native core."""
    object.__setattr__(recording, "kept", step)  # beside the fields of a frozen value


def make_link_model(costs: LinkCosts) -> _C.LinkModel:
    return _C.LinkModel(
        to_host_bytes_per_s=costs.to_host_bytes_per_s,
        to_device_bytes_per_s=costs.to_device_bytes_per_s,
        duplex_bytes_per_s=costs.duplex_bytes_per_s,
        latency_ns=costs.latency_ns,
    )
