"""Adds what a step costs the host to its recording: to that of a rehearsed step the costs of a session, and to that of
a session's step what was measured later.

A rehearsal counts the time in which the host issues operations. A session adds its hooks, and to each recompute the
proof of its recipe. Where in a step the hooks run makes little difference, so their time is spread evenly.
"""

from __future__ import annotations

from dataclasses import replace

from vdnn.hardware import HostFigures
from vdnn.step.recording import Lifetime, Recording


def with_session(recording: Recording, host: HostFigures, saves: int, *, synchronizes: bool) -> Recording:
    """The recording under a session that sees this number of saves in a step, including saves that no plan moves."""
    return replace(with_host(recording, host.save_ns * saves, host), synchronizes=synchronizes)


def with_host(recording: Recording, issue_ns: int, host: HostFigures) -> Recording:
    """The recording on a host that takes this much longer to issue the step, and to recompute what `host` says."""
    count = len(recording.points)
    points = tuple(
        replace(point, issue_ns=point.issue_ns + issue_ns * (index + 1) // count - issue_ns * index // count)
        for index, point in enumerate(recording.points)
    )
    return replace(recording, points=points, lifetimes=tuple(_with_proof(one, host) for one in recording.lifetimes))


def _with_proof(lifetime: Lifetime, host: HostFigures) -> Lifetime:
    recompute = lifetime.recompute
    if recompute is None:
        return lifetime
    encoding_ns = host.operation_ns + host.launch_ns if recompute.kept_bytes else 0
    return replace(
        lifetime,
        recompute=replace(recompute, issue_ns=recompute.issue_ns + host.recompute_ns, discard_issue_ns=encoding_ns),
    )
