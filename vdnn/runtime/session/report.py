"""The text of Session.report()."""

from __future__ import annotations

from collections.abc import Sequence

from vdnn.bytesize import format_bytes
from vdnn.planning.least_memory import describe_interval, least_bytes
from vdnn.runtime.steps.steps import Steps
from vdnn.runtime.storage.counters import Counters
from vdnn.runtime.storage.holders import describe_holders
from vdnn.runtime.storage.transport import Transport
from vdnn.step.recording import Recording

_SHOWN = 3


def session_report(
    policy: str,
    counters: Counters,
    transports: Sequence[Transport],
    steps: Steps,
    recipe_lines: Sequence[str],
) -> str:
    """The session's counters, and its plan and timeline if it has them. `recipe_lines` are lines on recomputing.

    The counts add up: what was offloaded, discarded, shared and kept to the saves, and the kinds of uses to the uses.

    If an offloaded storage was not freed, this searches Python's objects for its holders.
    """
    lines = [
        f"policy {policy}: {counters.saves} saves of {format_bytes(counters.saved_bytes)}",
        f"  offloaded {counters.storages} storages, {format_bytes(counters.storage_bytes)}",
        f"  discarded without a copy {counters.discarded} storages, {format_bytes(counters.discarded_bytes)}",
        f"  {counters.shared_saves} saves share a storage with an earlier save",
    ]
    lines += [
        f"  kept {count} saves, {format_bytes(counters.kept_bytes[reason])}: {reason.value}"
        for reason, count in counters.kept.most_common()
    ]
    lines += [
        f"  freed {format_bytes(counters.freed_bytes)}; copied but not freed, because somebody else holds it: "
        f"{format_bytes(counters.copied_not_freed_bytes)}",
        f"  {counters.uses} uses: {counters.used_in_place} still on the device, {counters.used_reloaded} already "
        f"reloaded, {counters.demand_reloads} reloaded on demand, {counters.used_recomputed} recomputed",
        f"  {counters.reloads} reloads of {format_bytes(counters.reloaded_bytes)}: {counters.prefetched_reloads} ahead "
        f"of a use, {counters.demand_reloads} on demand",
        f"  {counters.recomputes} recomputes",
    ]
    lines += recipe_lines
    for transport in transports:
        lines += _holders(transport)
        if transport.integrity is not None:
            check = transport.integrity
            lines.append(f"  integrity: {check.compared} storages compared, {check.failed} differ")
    return "\n".join(lines + _step_lines(steps))


def _holders(transport: Transport) -> list[str]:
    return [
        f"  copied, and still on the device: {format_bytes(one.nbytes)}, {one.label}, held by {' and '.join(names)}"
        for one, names in describe_holders(list(transport.held))[:_SHOWN]
    ]


def _step_lines(steps: Steps) -> list[str]:
    lines = [] if steps.budget is None else steps.budget.lines()
    lines += [f"  {line}" for line in steps.stored_lines]
    if steps.plan_use is not None:
        lines += [f"  {line}" for line in steps.plan_use.lines()]
    if steps.plan is not None:
        lines.append(f"  follows a plan by {steps.plan.policy}")
        lines += [f"  {line}" for line in steps.host_lines]
    if steps.first_difference is not None:
        lines.append(f"  {steps.first_difference}")
    if steps.recording is not None:
        lines += _immovable_peak(steps.recording)
        lines += _never_freed(steps.recording)
    timeline = steps.timeline
    if timeline is not None:
        waited = (
            f"of which compute waited {timeline.release_stall_ns / 1e6:.2f} ms for offloads and "
            f"{timeline.reload_stall_ns / 1e6:.2f} ms for reloads; peak {format_bytes(timeline.peak_bytes)}"
        )
        step = f"{timeline.step_ns / 1e6:.2f} ms"
        if timeline.clock == "virtual":
            lines.append(f"  last step run in virtual time: {step}, {waited}")
        else:
            lines.append(f"  last measured step: {step} by the {timeline.clock} clock, {waited}")
    return lines


def _immovable_peak(recording: Recording) -> list[str]:
    """A line if even releasing every storage at once does not lower the peak: then no policy and no plan does."""
    peaks = [point.peak_bytes for point in recording.points]
    peak_bytes = max(peaks)
    if least_bytes(recording) < peak_bytes:
        return []
    interval = describe_interval(recording, peaks.index(peak_bytes))
    return [
        f"  offloading cannot lower the peak of {format_bytes(peak_bytes)}: it is at {interval}, where nothing that "
        "was saved is left to move"
    ]


def _never_freed(recording: Recording) -> list[str]:
    """The largest storages that a release does not free before their graph ends, with the operation that saved them."""
    held = [one for one in recording.lifetimes if one.free_point >= one.end_point]
    held.sort(key=lambda one: -one.nbytes)
    lines = []
    for one in held[:_SHOWN]:
        key = recording.points[one.saves[0]].key
        lines.append(f"  held by somebody else for its whole lifetime: {format_bytes(one.nbytes)}, {key}")
    return lines
