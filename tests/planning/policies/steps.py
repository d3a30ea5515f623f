"""Steps for tests of policies: chains with named operations and modules, storages saved twice, and random ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from tests.planning.recordings import any_recording, chain
from vdnn.planning.costs import LinkCosts
from vdnn.planning.planned_step import plan_step
from vdnn.planning.policies import PlanPolicy
from vdnn.step.plan import Absence, Plan
from vdnn.step.recording import Lifetime, Point, PointKind, Recording

EVEN = LinkCosts(1e9, 1e9, 2e9, 0)  # one nanosecond for each byte
CONVOLUTION = "ConvolutionBackward0"


def made_plan(
    policy: str | PlanPolicy, recording: Recording, budget_bytes: int | None = None, costs: LinkCosts = EVEN
) -> Plan:
    return plan_step(recording, costs, budget_bytes, policy).plan


def absences_of(plan: Plan) -> dict[int, tuple[Absence, ...]]:
    """The absences by lifetime, of offloaded lifetimes only."""
    return {index: one.absences for index, one in enumerate(plan.lifetimes) if one.absences}


def with_operations(recording: Recording, operations: Sequence[str]) -> Recording:
    """The recording with the operation that uses each lifetime."""
    points = [
        dataclasses.replace(point, operation=operations[point.lifetime])
        if point.kind is PointKind.USE and point.lifetime is not None
        else point
        for point in recording.points
    ]
    return dataclasses.replace(recording, points=tuple(points))


def with_modules(recording: Recording, modules: Sequence[str]) -> Recording:
    """The recording with the module that saves each lifetime."""
    points = [
        dataclasses.replace(point, key=dataclasses.replace(point.key, module=modules[point.lifetime]))
        if point.key is not None and point.lifetime is not None
        else point
        for point in recording.points
    ]
    return dataclasses.replace(recording, points=tuple(points))


def with_lifetimes(recording: Recording, changes: Mapping[int, Mapping[str, object]]) -> Recording:
    lifetimes = list(recording.lifetimes)
    for index, change in changes.items():
        lifetimes[index] = dataclasses.replace(lifetimes[index], **change)  # type: ignore[arg-type]
    return dataclasses.replace(recording, lifetimes=tuple(lifetimes))


def with_compute(recording: Recording, compute_ns: Mapping[int, int]) -> Recording:
    points = [
        dataclasses.replace(point, compute_ns=compute_ns.get(index, point.compute_ns))
        for index, point in enumerate(recording.points)
    ]
    return dataclasses.replace(recording, points=tuple(points))


def used_twice(sizes: Sequence[int]) -> Recording:
    """A chain whose first storage is used twice: it has the first use of the chain and the last."""
    plain = chain(sizes)
    count = len(sizes)
    extra = Point(PointKind.USE, 0, None, 1000, plain.points[count - 1].allocated_bytes, plain.points[count].peak_bytes)
    points = (*plain.points[:count], extra, *plain.points[count:])
    shifted = [_behind(lifetime, count) for lifetime in plain.lifetimes]
    first = shifted[0]
    shifted[0] = dataclasses.replace(first, uses=(count, *first.uses), read=(count + 1, *first.read))
    return dataclasses.replace(plain, points=points, lifetimes=tuple(shifted))


def _behind(lifetime: Lifetime, place: int) -> Lifetime:
    """The lifetime in a step with one more point at `place`."""

    def moved(point: int) -> int:
        return point + (point >= place)

    return Lifetime(
        lifetime.nbytes,
        tuple(map(moved, lifetime.saves)),
        tuple(map(moved, lifetime.uses)),
        tuple(map(moved, lifetime.read)),
        moved(lifetime.copy_point),
        moved(lifetime.free_point),
        moved(lifetime.end_point),
    )


@st.composite
def wild_recording(draw: st.DrawFn) -> Recording:
    """Any recording, with operations, modules, storages that several modules save, and operations that use several
    storages."""
    recording = draw(any_recording())
    for _ in range(draw(st.integers(0, 2))):
        recording = _with_another_save(draw, recording)
    names = st.sampled_from(["", CONVOLUTION, "ReluBackward0"])
    recording = with_operations(recording, [draw(names) for _ in recording.lifetimes])
    paths = st.sampled_from(["", "stem", "layers.0.a", "layers.0.b", "layers.1", "head"])
    recording = with_modules(recording, [draw(paths) for _ in recording.lifetimes])
    idle = {index: 0 for index in range(len(recording.points)) if draw(st.integers(0, 3)) == 0}
    return _with_joint_operations(draw, with_compute(recording, idle))


def _with_another_save(draw: st.DrawFn, recording: Recording) -> Recording:
    index = draw(st.integers(0, len(recording.lifetimes) - 1))
    lifetime = recording.lifetimes[index]
    before = min([lifetime.end_point, *lifetime.uses])
    place = draw(st.integers(lifetime.saves[-1] + 1, max(before, lifetime.saves[-1] + 1)))
    like = recording.points[lifetime.saves[0]]
    live = recording.points[place - 1].allocated_bytes
    point = dataclasses.replace(like, allocated_bytes=live, peak_bytes=recording.points[place].peak_bytes)
    points = (*recording.points[:place], point, *recording.points[place:])
    lifetimes = [_behind(one, place) for one in recording.lifetimes]
    saves = tuple(sorted((*lifetimes[index].saves, place)))
    lifetimes[index] = dataclasses.replace(lifetimes[index], saves=saves)
    return dataclasses.replace(recording, points=points, lifetimes=tuple(lifetimes))


def _with_joint_operations(draw: st.DrawFn, recording: Recording) -> Recording:
    """Consecutive uses become uses of one operation."""
    lifetimes = list(recording.lifetimes)
    for use in reversed(range(len(recording.points) - 1)):
        here, behind = recording.points[use], recording.points[use + 1]
        if here.lifetime is None or behind.lifetime is None or here.lifetime == behind.lifetime:
            continue
        if here.kind is PointKind.USE and behind.kind is PointKind.USE and draw(st.booleans()):
            later = lifetimes[behind.lifetime]
            read_point = later.read[later.uses.index(use + 1)]
            lifetime = lifetimes[here.lifetime]
            read = tuple(
                read_point if one == use else old for one, old in zip(lifetime.uses, lifetime.read, strict=True)
            )
            lifetimes[here.lifetime] = dataclasses.replace(lifetime, read=read)
    return dataclasses.replace(recording, lifetimes=tuple(lifetimes))
