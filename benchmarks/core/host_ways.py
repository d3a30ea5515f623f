"""The ways to run a training step whose host time host_time.py compares.

Sessions run over a native device that copies bytes on the host. Steps that are recorded, measured or guarded need a
clock and a count of memory, which tensors on the CPU do not have: `CountedGauges` stand in for those of a GPU. Their
marks are real events of the native device, their memory is a constant, and they count what is asked of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint

import vdnn
from benchmarks.core.small_plans import Model, of_size
from benchmarks.models.workload import Workload
from vdnn import _C
from vdnn.runtime.machine.gauges import Gauges, Mark, Peaks
from vdnn.runtime.session import offload as offload_module
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.steps import StepWatch
from vdnn.runtime.storage.transport import Transport
from vdnn.step.plan import Plan

SHARES = (0.9, 0.75, 0.65, 0.55)  # of the peak of the step with everything kept
LENGTHS = tuple((2, tokens) for tokens in (15, 9, 13, 6, 11, 4, 14, 8, 12, 5, 10, 7))  # in turn; plans are made for 16
# For one turn. All are within the plan, as in a session with a budget, where a larger step gets a plan of its own.
NEW_LENGTHS = tuple(size for tokens in range(16, 2, -1) for size in ((2, tokens), (3, tokens - 6))[: 1 + (tokens > 8)])
_LENGTHS_AT = 0.65
_HUGE = "1GiB"  # a budget that no step of a small model exceeds
_CONSTANT_BYTES = 1 << 20

PLAIN, NO_OP, SAVE_ON_CPU, CHECKPOINT = "plain", "no-op hooks", "save_on_cpu", "checkpoint of every block"
PLAIN_LENGTHS, LENGTHS_WAY = "plain, lengths that change", f"plan, {_LENGTHS_AT:.0%}, lengths that change"
PLAIN_NEW, NEW_WAY = "plain, a new length in each step", f"plan, {_LENGTHS_AT:.0%}, a new length in each step"
GUARDED = "guarded, no plan"
RECORDED, RECORDED_RECIPES = "recorded, no recipes", "recorded, with recipes"
FIRST = "first step of a session with a budget"
EACH_STEP = "a new session in each step, with a budget"
ONLINE = ("vdnn-all", "recompute-all")


def settled(share: float) -> str:
    return f"plan, {share:.0%}, settled"


def measured(share: float) -> str:
    return f"plan, {share:.0%}, each step measured"


class CountedGauges(Gauges):
    """Gauges of a device without a count of memory. `readings` and `marks` are those of all gauges so far."""

    clock = "device"
    reads_ends = False  # as a GPU's
    readings = 0
    marks = 0

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self._device = transport.device

    def mark(self, stream: _C.Stream) -> Mark:
        CountedGauges.marks += 1
        return self._device.record(stream, timing=True)

    def fall_behind(self, stream: _C.Stream) -> bool:
        """Does nothing: nothing runs behind the host."""
        return False

    def ns_between(self, begin: Mark, end: Mark) -> int:
        return self._device.elapsed_ns(begin, end)

    def ns_until(self, begin: Mark, event: _C.Event) -> int:
        return self._device.elapsed_ns(begin, event)

    def allocated_bytes(self) -> int:
        CountedGauges.readings += 1
        return _CONSTANT_BYTES

    def take_peaks(self) -> Peaks:
        CountedGauges.readings += 1
        return Peaks(_CONSTANT_BYTES, _CONSTANT_BYTES + self.absent_bytes, _CONSTANT_BYTES)

    def hook_ends(self, *, has_changed: bool) -> Peaks:
        """As a GPU's, whose statistics take long to read."""
        if has_changed or self._is_unread:
            return self.take_peaks()
        return Peaks(_CONSTANT_BYTES, _CONSTANT_BYTES + self.absent_bytes, _CONSTANT_BYTES)

    def allocated_in_hook(self, *, has_changed: bool) -> int:
        return self.allocated_bytes() if has_changed or self._is_unread else _CONSTANT_BYTES

    def pause(self) -> None:
        """Does nothing."""

    def resume(self) -> None:
        """Does nothing."""


@contextlib.contextmanager
def counted_gauges() -> Iterator[None]:
    """Inside, sessions over native devices have CountedGauges."""
    with (
        mock.patch.object(offload_module, "_require_clock", return_value=None),
        mock.patch.object(offload_module, "_gauges", side_effect=_gauges),
    ):
        yield


def _gauges(_: object, transport: Transport) -> CountedGauges:
    return CountedGauges(transport)


@dataclasses.dataclass(slots=True)
class Way:
    """`step` runs one step, without freeing its gradients. `before` runs ahead of it and does not count. `learns`: so
    many steps until all later ones are alike."""

    workload: Workload
    step: Callable[[], None]
    learns: int = 2
    before: Callable[[], None] = lambda: None
    session: Session | None = None


def ways_of(model: Model, plans: dict[float, Plan], device: Callable[[], _C.Device]) -> dict[str, Way]:
    """All ways for one model, which all but checkpointing share. Call it and take its steps inside counted_gauges()."""
    torch.manual_seed(0)
    workload, checkpointed = model.small(), checkpointing(model)
    ways = {
        PLAIN: Way(workload, workload.step),
        NO_OP: Way(workload, _inside(workload, lambda: torch.autograd.graph.saved_tensors_hooks(_same, _same))),
        SAVE_ON_CPU: Way(workload, _inside(workload, torch.autograd.graph.save_on_cpu)),
        CHECKPOINT: Way(checkpointed, checkpointed.step),
    }
    for share in SHARES:
        ways[settled(share)] = _in_session(workload, _open(device(), plan=plans[share]), learns=6)
    for share in SHARES:
        ways[measured(share)] = _in_session(workload, _open(device(), plan=plans[share], measure=True), learns=3)
    ways[GUARDED] = _guarded(workload, device())
    for name, recompute in ((RECORDED, False), (RECORDED_RECIPES, True)):
        ways[name] = _recorded(workload, device(), recompute=recompute)
    ways[FIRST] = Way(workload, _first_step(workload, device))
    ways[EACH_STEP] = Way(workload, _new_session(workload, device()), learns=8)
    if model.has_lengths:
        for plain, way, sizes, learns in (
            (PLAIN_LENGTHS, LENGTHS_WAY, LENGTHS, 6 * len(LENGTHS)),  # the first five of a length differ
            (PLAIN_NEW, NEW_WAY, NEW_LENGTHS, 6),
        ):
            shapes = [of_size(workload, *size) for size in sizes]
            ways[plain] = Way(workload, _in_turn([one.step for one in shapes]), learns)
            session = _open(device(), plan=plans[_LENGTHS_AT])
            steps = [_in_session(one, session).step for one in shapes]
            ways[way] = Way(workload, _in_turn(steps), learns, session=session)
    for policy in ONLINE:
        ways[policy] = _in_session(workload, _open(device(), policy), learns=8)
    return ways


def checkpointing(model: Model) -> Workload:
    """A model that checkpoints each block."""
    workload = model.small()
    for module in workload.model.modules():
        if isinstance(module, model.block):
            module.forward = _checkpointed(module.forward)
    return workload


def _checkpointed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _inside(workload: Workload, hooks: Callable[[], contextlib.AbstractContextManager[object]]) -> Callable[[], None]:
    def step() -> None:
        with hooks():
            workload.step()

    return step


def _in_turn(steps: list[Callable[[], None]]) -> Callable[[], None]:
    left: list[Callable[[], None]] = []

    def step() -> None:
        if not left:
            left.extend(reversed(steps))
        left.pop()()

    return step


def _open(device: _C.Device, policy: str = "auto", **options: object) -> Session:
    session: Session = vdnn.offload(policy, device=device, min_bytes=0, **options)  # type: ignore[arg-type]
    return session


def _in_session(workload: Workload, session: Session, *, learns: int = 2) -> Way:
    def step() -> None:
        with session:
            workload.step()
            session.step()

    return Way(workload, step, learns=learns, session=session)


def _watch(session: Session) -> StepWatch:
    steps = session._engine.steps
    if not isinstance(steps, StepWatch):
        raise RuntimeError("expected a session that watches its steps, got one that watches none")
    return steps


def _recorded(workload: Workload, device: _C.Device, *, recompute: bool) -> Way:
    """Each step is recorded, as the first one of its kind is."""
    session = _open(device, "keep", measure=True, recompute=recompute)
    way = _in_session(workload, session, learns=3)

    def forget() -> None:
        _watch(session)._measured.last_recorded = None
        _watch(session)._begin_observers(is_settled=False)

    return dataclasses.replace(way, before=forget)


def _guarded(workload: Workload, device: _C.Device) -> Way:
    """Each step has a guard, which moves nothing, but no plan and no recorder, like steps that cannot be planned."""
    session = _open(device, budget=_HUGE, recompute=False)
    mock.patch.object(_watch(session)._plans, "choose", return_value=None).start()
    return _in_session(workload, session)


def _first_step(workload: Workload, device: Callable[[], _C.Device]) -> Callable[[], None]:
    """Recorded, with recipes that are tried for the first time, under a guard. The plan is not in it."""

    def step() -> None:
        session = _open(device(), budget=_HUGE)
        session._key = None  # else it would go on where an earlier session of this process ended
        with session:
            workload.step()
        session.close()

    return step


def _new_session(workload: Workload, device: _C.Device) -> Callable[[], None]:
    def step() -> None:
        session = _open(device, budget=_HUGE)
        with session:
            workload.step()
            session.step()

    return step
