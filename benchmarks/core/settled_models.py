"""The host time of the hooks of a whole step under a plan, for recordings of three models, settled and not.

The saves and uses of a recording are replayed with small tensors, by calling the hooks as autograd does, under a plan
that was made for the recording. The uses run inside a backward, and no tensor is held beyond its last save. The native
device keeps time and moves no bytes, or is CUDA's over a driver library (`--library`, such as the fake driver of the
tests). What it leaves out: the exempt saves of parameters, which have no points, and the statistics of a CUDA
allocator, which the hooks of a step that is not settled read besides.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

import vdnn
from benchmarks.core.settled_times import SettledTimes, measure_and_show
from benchmarks.models.gpt import gpt2
from benchmarks.models.llama import llama_1b
from benchmarks.models.resnet import resnet50
from benchmarks.models.workload import Workload
from vdnn import _C
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.search.prefix_cut import prefix_cut
from vdnn.runtime.session.session import Session
from vdnn.step.plan import Action, Plan, PlannedPoint
from vdnn.step.recording import PointKind, Recording, SaveKey

_BUDGETS = (0.9, 0.75)  # of the peak of the step with everything kept
_ELEMENTS = 64
# Steps under a plan until it is settled, and steps that are timed, of which the median counts.
_LEARNED = 5
_TIMED = 15


def models() -> dict[str, Callable[[], Workload]]:
    return {"ResNet-50 (64)": lambda: resnet50(64), "GPT-2 (4)": lambda: gpt2(4), "Llama 1B (1)": lambda: llama_1b(1)}


def recorded(make: Callable[[], Workload]) -> Recording:
    """The recording of a step without data, on a virtual machine."""
    with vdnn.VirtualMachine("h100") as machine:
        workload = make()
        with vdnn.offload("keep", device=machine, measure=True, recompute=False) as session:
            for _ in range(2):
                workload.step()
                session.step()
        recording = session.recording
    if recording is None:
        raise RuntimeError("expected a recording after two steps, got none")
    return recording


def small_plan(recording: Recording, share: float) -> Plan:
    """A plan for a share of the peak, as if each storage had few bytes and were made by `sin`."""
    budget = max(least_bytes(recording), round(share * recording.peak_bytes))
    plan = prefix_cut(recording, budget)
    keys: dict[int, SaveKey] = {}
    points: list[PlannedPoint] = []
    for number, point in enumerate(plan.points):
        key = None
        if point.kind is PointKind.SAVE and point.lifetime is not None:
            key = SaveKey("SinBackward0", "", "float32", (_ELEMENTS,), (1,), len(keys))
            keys[number] = key
        points.append(replace(point, key=key))
    lifetimes = tuple(replace(one, nbytes=4 * _ELEMENTS) for one in plan.lifetimes)
    return replace(plan, points=tuple(points), lifetimes=lifetimes)


class _Replay:
    """One step: the saves of a plan, and then its uses inside a backward. Each tensor lives until its last save."""

    def __init__(self, session: Session, plan: Plan, leaf: torch.Tensor) -> None:
        packer = session._engine.packer
        self._pack, self._unpack = packer.pack_hook, packer.unpack_hook
        self._points = [point for point in plan.points if point.lifetime is not None]
        self._leaf = leaf
        self._tensors: dict[int, torch.Tensor] = {}
        self._packed: list[list[object]] = [[] for _ in plan.lifetimes]
        self._uses = [0] * len(plan.lifetimes)
        self._left = {kind: [0] * len(plan.lifetimes) for kind in PointKind}
        for point in self._points:
            if point.lifetime is not None:
                self._left[point.kind][point.lifetime] += 1
        self.taken_ns = 0

    def run(self) -> None:
        first_use = next(
            (index for index, point in enumerate(self._points) if point.kind is PointKind.USE), len(self._points)
        )
        with torch.no_grad():
            self._replay(self._points[:first_use])
        result = self._leaf.sin()  # its save is exempt: a leaf
        if result.grad_fn is None:
            raise RuntimeError("expected a leaf that requires a gradient")
        result.grad_fn.register_prehook(lambda _: self._replay(self._points[first_use:]))
        result.sum().backward()  # type: ignore[no-untyped-call]

    def _replay(self, points: list[PlannedPoint]) -> None:
        for point in points:
            if point.lifetime is None:
                continue
            if point.kind is PointKind.SAVE:
                self._save(point.lifetime)
            else:
                self._use(point.lifetime)

    def _save(self, number: int) -> None:
        if number not in self._tensors:
            with torch.enable_grad():
                self._tensors[number] = self._leaf.sin()
        tensor = self._tensors[number]
        begin_ns = time.thread_time_ns()
        packed = self._pack(tensor)
        self.taken_ns += time.thread_time_ns() - begin_ns
        self._packed[number].append(packed)
        self._left[PointKind.SAVE][number] -= 1
        if not self._left[PointKind.SAVE][number]:
            del self._tensors[number]

    def _use(self, number: int) -> None:
        saves = self._packed[number]
        save = saves[min(self._uses[number], len(saves) - 1)]
        begin_ns = time.thread_time_ns()
        self._unpack(save)
        self.taken_ns += time.thread_time_ns() - begin_ns
        self._uses[number] += 1
        if self._uses[number] == self._left[PointKind.USE][number]:
            del save
            saves.clear()


def replay_ns(session: Session, plan: Plan, leaf: torch.Tensor) -> int:
    """Runs the hooks of one step, and returns their processor time."""
    replay = _Replay(session, plan, leaf)
    replay.run()
    session.step()
    return replay.taken_ns


def hook_us(plan: Plan, device: _C.Device, *, settles: bool) -> float:
    """The median processor time of a step's hooks."""
    leaf = torch.rand(_ELEMENTS, requires_grad=True)
    given: object = device
    with vdnn.offload(device=given, plan=plan, min_bytes=0) as session:  # type: ignore[arg-type]
        settling = session._engine.steps.settling
        if settling is None:
            raise RuntimeError("expected a session that follows a plan, got one that watches no steps")
        if not settles:
            settling.gate = None
        for _ in range(_LEARNED):
            replay_ns(session, plan, leaf)
        if settling.is_expected is not settles:
            raise RuntimeError(f"expected the replayed step to settle: {settles}, got {settling.is_expected}")
        gc.collect()
        times = [replay_ns(session, plan, leaf) for _ in range(_TIMED)]
    session.close()
    return statistics.median(times) / 1e3


def measure(library: str | None) -> list[SettledTimes]:
    rows = []
    for name, make in models().items():
        recording = recorded(make)
        for share in _BUDGETS:
            plan = small_plan(recording, share)
            python_us, settled_us = (
                hook_us(
                    plan, _C.SimDevice(moves_bytes=False) if library is None else _C.CudaDevice(0, library), settles=one
                )
                for one in (False, True)
            )
            rows.append(
                SettledTimes(
                    model=name,
                    budget_share=share,
                    points=len(plan.points) - 1,
                    lifetimes=len(plan.lifetimes),
                    offloaded=sum(one.action is Action.OFFLOAD for one in plan.lifetimes),
                    python_us=python_us,
                    settled_us=settled_us,
                )
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    description = __doc__.split("\n")[0]
    return measure_and_show(
        measure,
        arguments,
        program="settled_models",
        description=description,
        default_device="a device that only keeps time",
    )


if __name__ == "__main__":
    sys.exit(main())
