"""The host time of the hooks of a whole step under a plan that recomputes, for three models, settled and not.

The plan is made for a model of full size, from a step without data on a virtual machine. A model of the same structure
and of small sizes follows it with real numbers, because a recompute runs real operations. The operations of recomputes
do not count as time of the hooks. Each hook is timed by the processor time of its thread. The native device copies
bytes on the host, or is CUDA's over a driver library (`--library`, such as the fake driver of the tests).
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import vdnn
from benchmarks.core.settled_times import SettledTimes, measure_and_show
from benchmarks.models.gpt import SMALL, gpt, gpt2
from benchmarks.models.llama import OF_1B, llama, llama_1b
from benchmarks.models.resnet import resnet, resnet50
from benchmarks.models.workload import Workload
from vdnn import _C
from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.runtime.recompute.recipe import Recipe
from vdnn.runtime.session.session import Session
from vdnn.step.plan import Action, Plan, PlannedPoint
from vdnn.step.recording import Recording

_MACHINE = "h100"
_BUDGETS = (0.75, 0.55)  # of the peak of the step with everything kept
# Steps under a plan until it is settled, and steps that are timed, of which the median counts.
_LEARNED = 6
_TIMED = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeTimes(SettledTimes):
    """Host times without the operations of recomputes. Of so many lifetimes, `recomputed` are recomputed."""

    recomputed: int

    @property
    def actions(self) -> str:
        return (
            f"{self.points} points, of {self.lifetimes} lifetimes {self.recomputed} recomputed, "
            f"{self.offloaded} offloaded"
        )


@dataclass(frozen=True, slots=True)
class Model:
    """A model of full size, and one of the same structure that takes next to no time."""

    whole: Callable[[], Workload]
    small: Callable[[], Workload]


def models() -> dict[str, Model]:
    return {
        "ResNet-50 (64)": Model(lambda: resnet50(64), lambda: resnet(2, (3, 4, 6, 3), side=32)),
        "GPT-2 (4)": Model(lambda: gpt2(4), lambda: gpt(2, 16, replace(SMALL, vocabulary=64, tokens=16, width=48))),
        "Llama 1B (1)": Model(
            lambda: llama_1b(1),
            lambda: llama(1, 16, replace(OF_1B, vocabulary=64, width=128, inner=256)),
        ),
    }


def recorded(make: Callable[[], Workload]) -> Recording:
    """The recording of a step without data, with the recipes that were found."""
    with vdnn.VirtualMachine(_MACHINE) as machine:
        workload = make()
        with vdnn.offload("keep", device=machine, measure=True, min_bytes=0) as session:
            for _ in range(2):
                workload.step()
                session.step()
        recording = session.recording
    if recording is None:
        raise RuntimeError("expected a recording after two steps, got none")
    return recording


def small_plan(whole: Recording, small: Recording, share: float) -> Plan:
    """The plan for a share of the peak of the model of full size, for the saves of the small one."""
    budget = max(least_bytes(whole), round(share * whole.peak_bytes))
    plan = plan_step(whole, profile_costs(load_profile(_MACHINE)), budget, "auto").plan
    if [(one.kind, one.lifetime) for one in whole.points] != [(one.kind, one.lifetime) for one in small.points]:
        raise RuntimeError("expected a small model with the saves and uses of the one of full size, got others")
    keys = {point.key: other.key for point, other in zip(whole.points, small.points, strict=True)}
    points = tuple(PlannedPoint(one.kind, one.lifetime, keys.get(one.key, one.key)) for one in plan.points)
    sizes = [one.nbytes for one in small.lifetimes]
    lifetimes = tuple(replace(one, nbytes=nbytes) for one, nbytes in zip(plan.lifetimes, sizes, strict=True))
    return replace(plan, points=points, lifetimes=lifetimes)


class Timed:
    """Times a hook, and counts as that hook where vdnn looks for its own."""

    def __init__(self, hook: Callable[[Any], Any], clock: Clock) -> None:
        self._hook = hook
        self._clock = clock

    def __call__(self, argument: Any) -> Any:
        with self._clock:
            return self._hook(argument)

    def __eq__(self, other: object) -> bool:
        return self._hook == other

    __hash__ = None  # type: ignore[assignment]


class Clock:
    """Adds up the processor time inside `with`, and takes out that of `without`."""

    def __init__(self) -> None:
        self.taken_ns = 0
        self._begin_ns = 0

    def __enter__(self) -> None:
        self._begin_ns = time.thread_time_ns()

    def __exit__(self, *_: object) -> None:
        self.taken_ns += time.thread_time_ns() - self._begin_ns

    @contextlib.contextmanager
    def without_recomputes(self) -> Iterator[None]:
        run = Recipe._run

        def timed(recipe: Recipe, values: list[Any]) -> torch.Tensor:
            begin_ns = time.thread_time_ns()
            try:
                return run(recipe, values)
            finally:
                self.taken_ns -= time.thread_time_ns() - begin_ns

        Recipe._run = timed  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            Recipe._run = run  # type: ignore[method-assign]


def hook_us(make: Callable[[], Workload], plan: Plan, device: _C.Device, *, settles: bool) -> float:
    """The median processor time of a step's hooks."""
    torch.manual_seed(0)
    workload, clock, given = make(), Clock(), device
    session: Session = vdnn.offload(device=given, plan=plan, min_bytes=0)  # type: ignore[arg-type]
    packer, settling = session._engine.packer, session._engine.steps.settling
    if settling is None:
        raise RuntimeError("expected a session that follows a plan, got one that watches no steps")
    if not settles:
        settling.gate = None
    pack, unpack = Timed(packer.pack_hook, clock), Timed(packer.unpack_hook, clock)
    packer.pack_hook, packer.unpack_hook = pack, unpack
    times = []
    with session, clock.without_recomputes():
        for _ in range(_LEARNED + _TIMED):
            gc.collect()
            clock.taken_ns = 0
            workload.step()
            session.step()
            times.append(clock.taken_ns)
        if settling.is_expected is not settles:
            raise RuntimeError(f"expected the step to settle: {settles}, got {settling.is_expected}")
    session.close()
    return statistics.median(times[_LEARNED:]) / 1e3


def measure(library: str | None) -> list[RecomputeTimes]:
    rows = []
    for name, model in models().items():
        whole, small = recorded(model.whole), recorded(model.small)
        for share in _BUDGETS:
            plan = small_plan(whole, small, share)
            python_us, settled_us = (
                hook_us(
                    model.small, plan, _C.SimDevice() if library is None else _C.CudaDevice(0, library), settles=one
                )
                for one in (False, True)
            )
            actions = [one.action for one in plan.lifetimes]
            rows.append(
                RecomputeTimes(
                    model=name,
                    budget_share=share,
                    points=len(plan.points) - 1,
                    lifetimes=len(actions),
                    recomputed=sum(one.is_recomputed for one in plan.lifetimes),
                    offloaded=actions.count(Action.OFFLOAD),
                    python_us=python_us,
                    settled_us=settled_us,
                )
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    description = __doc__.split("\n")[0]
    return measure_and_show(
        measure, arguments, program="recomputed_models", description=description, default_device="a simulated device"
    )


if __name__ == "__main__":
    sys.exit(main())
