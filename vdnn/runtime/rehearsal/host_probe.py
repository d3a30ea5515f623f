"""Measures what this machine's host needs to issue a step, for `vdnn doctor` and `host_speed="measured"`.

Small blocks, like those of a decoder without attention, are trained in four ways in turn: plain, and under three plans.
One keeps everything, one moves a save of each block, and one recomputes a save of each block. The difference between
the times of two ways, divided by the number of actions, is the cost of an action. Only the processor time of the
calling thread counts, medians over the turns. Without a GPU the tensors are on the CPU and copies go to a simulated
device: operations then contain their small arithmetic, copies wake a thread of that device in place of the driver's
part, and launches are not measured.
"""

from __future__ import annotations

import platform
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from vdnn import _C
from vdnn.errors import InvalidArgumentError, VdnnError
from vdnn.hardware import HardwareProfile, HostFigures
from vdnn.hardware.measured_host import MeasuredHost, keep_host, kept_host, machine_name
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.offload import offload
from vdnn.runtime.session.session import Session
from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime, make_plan
from vdnn.step.recording import Lifetime, Recording
from vdnn.user_warnings import VdnnWarning
from vdnn.version import __version__

_BLOCKS, _WIDTH = 16, 16
_NEAR = 8  # points before a use at which its storage is fetched
_TURNS = 20
_LEARNED, _TIMED = 8, 3  # steps of a way in its first turn, and in each one
_CALLS = 1000
_MOVED = "gelu"  # the operation whose results are moved or recomputed
_COUNTS = HostFigures(operation_ns=1, launch_ns=0, save_ns=0, copy_ns=0, recompute_ns=0)


def host_of(profile: HardwareProfile, host_speed: float | str = 1.0) -> HostFigures | None:
    """The figures of the host to plan for: those of the profile for a speed, or this machine's for "measured", which
    are measured if none are kept. None if the profile has none."""
    if host_speed == "measured":
        return (kept_host(_machine()) or measured_host()).figures(profile)
    if isinstance(host_speed, str):
        raise InvalidArgumentError(
            argument="host_speed", expected="a number above zero, or 'measured'", got=repr(host_speed)
        )
    return HostFigures.of(profile, host_speed)


def measured_host(turns: int = _TURNS) -> MeasuredHost:
    """Measures this machine's host and keeps the figures. Takes a few seconds. Raises VdnnError if a step differs from
    its plan. Blocks where a GPU has to finish what was issued; that time does not count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more of them, the calling one waits for the others, and that would count
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(), torch.enable_grad():
            warnings.simplefilter("ignore", VdnnWarning)
            found = _measured(turns)
    finally:
        torch.set_num_threads(threads)
    keep_host(found)
    return found


class _StepCounts(NamedTuple):
    """A plain step of the blocks: its operations, views included, those that run on the device, and its saves."""

    operations: int
    launches: int
    saves: int


class _Taken(NamedTuple):
    forward_ns: float
    backward_ns: float

    @property
    def step_ns(self) -> float:
        return self.forward_ns + self.backward_ns


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return out


def _blocks(device: str) -> tuple[nn.Module, torch.Tensor]:
    with torch.device(device):
        return nn.Sequential(*(_Block() for _ in range(_BLOCKS))), torch.ones(_WIDTH, _WIDTH)


def _measured(turns: int) -> MeasuredHost:
    recording, counts = _rehearsed()
    moved = [index for index, one in enumerate(recording.lifetimes) if _is_moved(one)]
    has_gpu = torch.cuda.is_available()
    where: Any = None if has_gpu else "sim"
    plans = {one: _plan(recording, moved, one) for one in (Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE)}
    sessions = {one: offload(plan=plan, device=where, min_bytes=0, recheck=0) for one, plan in plans.items()}
    try:
        plain, taken = _turns("cuda" if has_gpu else "cpu", sessions, turns)
        _require_followed(sessions, len(moved) * (_LEARNED + turns * (_TIMED + 1)))
    finally:
        for session in sessions.values():
            session.close()
    keep, out, again = (taken[one] for one in sessions)
    launch_ns = _launch_ns() if has_gpu else None
    operation_ns = (plain.step_ns - counts.launches * (launch_ns or 0)) / counts.operations
    return MeasuredHost(
        machine=_machine(),
        operation_ns=_whole(operation_ns),
        launch_ns=launch_ns,
        save_ns=_whole((keep.step_ns - plain.step_ns) / counts.saves),
        move_out_ns=_whole((out.forward_ns - keep.forward_ns) / len(moved)),
        fetch_ns=_whole((out.backward_ns - keep.backward_ns) / len(moved)),
        recompute_ns=_whole((again.step_ns - keep.step_ns) / len(moved) - operation_ns - (launch_ns or 0)),
        event_ns=_event_ns(has_gpu=has_gpu),
    )


def _whole(nanoseconds: float) -> int:
    """At least 1: on a busy machine a difference may come out below zero, and a figure of a host is above it."""
    return max(1, round(nanoseconds))


def _machine() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return machine_name(gpu, f"Python {platform.python_version()}", f"torch {torch.__version__}", f"vdnn {__version__}")


def _rehearsed() -> tuple[Recording, _StepCounts]:
    """A recorded step of the blocks, and the counts of a plain one."""
    with VirtualMachine("h100", host=_COUNTS) as machine:
        model, x = _blocks("cpu")
        with offload("keep", device=machine, measure=True, min_bytes=0) as session:
            for _ in range(2):
                saves = session.counters.saves
                model(x).sum().backward()
                session.step()
            saves = session.counters.saves - saves
            recording = session.recording
        session.close()
        issued, launched = machine.issued_ns, machine.operations
        model(x).sum().backward()
        counts = _StepCounts(machine.issued_ns - issued, machine.operations - launched, saves)
    if recording is None or not any(_is_moved(one) for one in recording.lifetimes):
        raise VdnnError(f"the host cannot be measured: a recorded step has no result of {_MOVED} to recompute.")
    return recording, counts


def _is_moved(lifetime: Lifetime) -> bool:
    """Moved is what can be recomputed, and is far enough from the end of the forward pass to be fetched ahead."""
    recompute = lifetime.recompute
    if recompute is None or recompute.operation != _MOVED:
        return False
    return lifetime.uses[0] - _NEAR > lifetime.free_point


def _plan(recording: Recording, moved: list[int], action: Action) -> Plan:
    """Does the same with each storage of `moved`, and keeps the others."""
    lifetimes = [PlannedLifetime(one.nbytes, Action.KEEP) for one in recording.lifetimes]
    if action is not Action.KEEP:
        for index in moved:
            one = recording.lifetimes[index]
            absences = (Absence(one.free_point, one.uses[0] - _NEAR),) if action is Action.OFFLOAD else ()
            lifetimes[index] = PlannedLifetime(one.nbytes, action, absences)
    return make_plan(recording, "host probe", tuple(lifetimes))


def _turns(device: str, sessions: dict[Action, Session], turns: int) -> tuple[_Taken, dict[Action, _Taken]]:
    """Takes steps plain and in each session, in turn. Returns the median step of each."""
    model, x = _blocks(device)
    plain: list[_Taken] = []
    taken: dict[Action, list[_Taken]] = {one: [] for one in sessions}
    for turn in range(turns):
        plain += [_step(model, x) for _ in range(_TIMED)]
        for one, session in sessions.items():
            with session:
                for _ in range(1 + _LEARNED * (turn == 0)):
                    _step(model, x, session)
                taken[one] += [_step(model, x, session) for _ in range(_TIMED)]
    return _median(plain), {one: _median(steps) for one, steps in taken.items()}


def _step(model: nn.Module, x: torch.Tensor, session: Session | None = None) -> _Taken:
    begin_ns = time.thread_time_ns()
    loss = model(x).sum()
    middle_ns = time.thread_time_ns()
    loss.backward()
    if session is not None:
        session.step()
    taken = _Taken(middle_ns - begin_ns, time.thread_time_ns() - middle_ns)
    model.zero_grad(set_to_none=True)
    return taken


def _median(steps: list[_Taken]) -> _Taken:
    return _Taken(*(statistics.median(part) for part in zip(*steps, strict=True)))


def _require_followed(sessions: dict[Action, Session], actions: int) -> None:
    """Raises VdnnError unless the sessions did what their plans say in each step."""
    moved, again = sessions[Action.OFFLOAD].counters, sessions[Action.RECOMPUTE].counters
    for name, count in (("copies", moved.storages), ("recomputes", again.recomputes)):
        if count != actions:
            raise VdnnError(f"the host cannot be measured: expected {actions} {name} of the plan, got {count}.")


def _each_ns(call: Callable[[], object]) -> float:
    call()
    begin_ns = time.thread_time_ns()
    for _ in range(_CALLS):
        call()
    return (time.thread_time_ns() - begin_ns) / _CALLS


def _launch_ns() -> int:
    """An operation that runs on the GPU, less one that only makes a view."""
    small = torch.zeros(1, device="cuda")
    return _whole(_each_ns(lambda: small.add_(1)) - _each_ns(lambda: small.view(1)))


def _event_ns(*, has_gpu: bool) -> int:
    """A mark on a stream, as each copy makes."""
    device = _C.CudaDevice(torch.cuda.current_device()) if has_gpu else _C.SimDevice()
    try:
        stream = device.create_stream("host probe")
        return _whole(_each_ns(lambda: device.record(stream)))
    finally:
        device.close()
