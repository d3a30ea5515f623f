"""The session of a mode: one that moves, one that recomputes, or one that plans for a share of the recorded peak."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

import vdnn
from tests.fuzz.program import SETTLED_STEPS, STEPS, STEPS_WITHOUT_PLAN
from vdnn.planning.footprint import offload_everything
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.policies import PlanPolicy, PlanRequest
from vdnn.planning.recomputing import candidates_of, planned_recompute, with_recomputes
from vdnn.planning.search.auto import Auto
from vdnn.planning.search.effort import Effort
from vdnn.runtime.machine.allocation_tracker import count_writes
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.runtime.steps.steps import StepWatch
from vdnn.step.plan import Action, Plan, PlannedLifetime, make_plan
from vdnn.step.recording import Recording

# The search effort of auto: tiny steps need no more.
_EFFORT = Effort(moves=0.02, most_trials=14)
Enter = Callable[[], contextlib.AbstractContextManager[Any]]
# Every step is checked, so a wrong recompute is found in its own step, or else the fuzzer finds it.
RECHECK = 1


@dataclass(frozen=True, slots=True)
class _SharePlanner(BudgetPlanner):
    """Plans for a budget between the least bytes and the peak of the recorded step."""

    share: float = 0.0

    def budget_bytes(self, recording: Recording) -> int:
        least = least_bytes(recording)
        return least + int(self.share * max(recording.peak_bytes - least, 0))


def is_planned(mode: str) -> bool:
    return mode == "drawn" or mode.startswith(("auto", "guarded", "stored"))


def settles(mode: str) -> bool:
    return mode.startswith("stored")


def steps_of(mode: str) -> int:
    if settles(mode):
        return SETTLED_STEPS
    return STEPS if is_planned(mode) else STEPS_WITHOUT_PLAN


class _DrawnPlan(PlanPolicy):
    """Recomputes a random share of what can be recomputed, and moves a random share of the rest. A search would not
    make these choices."""

    name = "drawn"
    source = "the fuzzer"

    def plan(self, request: PlanRequest) -> Plan:
        recording = request.recording
        random = Random(len(recording.points))
        often = random.choice([0.4, 0.8, 1.0])
        chosen = {one for one in candidates_of(recording) if random.random() < often}
        followed = with_recomputes(recording, chosen)
        moved = offload_everything(followed)
        lifetimes = tuple(
            planned_recompute(recording.lifetimes[index])
            if index in chosen
            else moved[index]
            if random.random() < 0.5
            else PlannedLifetime(one.nbytes, Action.KEEP)
            for index, one in enumerate(followed.lifetimes)
        )
        return make_plan(followed, "everything", lifetimes)


def open_planned(budget: int | str, device: Any, recheck: int, **options: Any) -> Session:
    return vdnn.offload(Auto(_EFFORT), budget=budget, device=device, min_bytes=0, recheck=recheck, **options)


def open_session(mode: str, device: Any, recheck: int = RECHECK) -> Session:
    if mode == "drawn":
        return vdnn.offload(_DrawnPlan(), device=device, min_bytes=0, recheck=recheck)
    if not is_planned(mode):
        return vdnn.offload(
            mode,
            device="sim",
            min_bytes=0,
            limits=vdnn.Limits(offload_window="256B", reload_window="512B"),
            recheck=recheck,
        )
    return _open_for_share(mode.removeprefix("auto "), device, recheck)


def _open_for_share(share: str, device: Any, recheck: int, **options: Any) -> Session:
    session = open_planned("min", device, recheck, **options)
    if share != "min":
        steps = session._engine.steps
        assert isinstance(steps, StepWatch)
        plans = steps._plans
        planner, maker = plans._planner, plans._maker
        assert planner is not None
        assert maker is not None
        maker.planner = plans._planner = _SharePlanner(
            planner.policy, planner.budget, planner.host_bytes, planner.profile, share=int(share) / 100
        )
    return session


class PlainDispatch(TorchDispatchMode):
    """A dispatch mode that does as little as possible. A virtual machine is a dispatch mode too, and under any such
    mode autograd adds gradients in another order."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch wraps each call

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if out is None:
            count_writes(function, args)
        return out


def plain_for(mode: str) -> contextlib.AbstractContextManager[object]:
    """The context in which plain PyTorch runs, so that it can be compared with the mode."""
    return PlainDispatch() if is_planned(mode) else contextlib.nullcontext()


@contextlib.contextmanager
def session_for(mode: str, recheck: int = RECHECK, run: Callable[[Enter], object] | None = None) -> Iterator[Enter]:
    """Yields a function that enters the mode's session. If the mode has a virtual machine, it is entered around the
    session. `run` runs the program once from its beginning, for modes with a share of the peak of the whole program:
    "guarded" never plans, and "stored" follows the plans of an earlier session from its first step on."""
    if mode.startswith(("guarded", "stored")):
        assert run is not None
        with _under_share(mode, recheck, run) as enter:
            yield enter
        return
    if not is_planned(mode):
        session = open_session(mode, "sim", recheck)
        try:
            yield lambda: session
        finally:
            session.close()
        return
    with VirtualMachine("titan-x", fake=False) as machine:
        session = open_session(mode, machine, recheck)
        try:
            yield lambda: session
        finally:
            session.close()


def _share_of_plain(share: int, run: Callable[[Enter], object]) -> int:
    """A budget between the most bytes that are there before a step, and the peak of all steps."""
    with VirtualMachine("titan-x", fake=False) as machine:
        before: list[int] = []

        def enter() -> contextlib.AbstractContextManager[None]:
            before.append(machine.tracker.live_bytes)
            return contextlib.nullcontext()

        run(enter)
        return max(before) + (machine.peak_bytes - max(before)) * share // 100


@contextlib.contextmanager
def _under_share(mode: str, recheck: int, run: Callable[[Enter], object]) -> Iterator[Enter]:
    kind, share = mode.split()
    if kind == "guarded":
        budget = _share_of_plain(int(share), run)
        moves_alone = int(share) < 60  # then the native gate keeps saves from the first step on
        with (
            VirtualMachine("titan-x", fake=False) as machine,
            contextlib.closing(
                open_planned(budget, machine, recheck, warmup_steps=STEPS, recompute=not moves_alone)
            ) as session,
        ):
            steps = session._engine.steps
            assert isinstance(steps, StepWatch)
            with mock.patch.object(steps._plans, "choose", return_value=None):
                yield lambda: session
        return
    with tempfile.TemporaryDirectory() as folder:
        for is_first in (True, False):
            with (
                VirtualMachine("titan-x", fake=False) as machine,
                contextlib.closing(_open_for_share(share, machine, recheck, plans=folder)) as session,
                session,  # one around all steps
            ):
                if is_first:
                    run(contextlib.nullcontext)
                else:
                    yield contextlib.nullcontext
