"""The ways of fitting a step into memory that a GPU run compares: torch's own, and vdnn's.

Each is a context manager around whole steps, backward included. Those of vdnn yield their session.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import vdnn
from benchmarks.models import Workload
from benchmarks.models.gpt import Block
from benchmarks.models.resnet import Bottleneck
from benchmarks.step_places import StepPlace
from vdnn.runtime.session import Session

# Machines whose memory grows as it is used say too little of what they have: the cap is told.
HOST_BUDGET = "64GiB"
# What is recomputed as one.
BLOCKS = (Block, Bottleneck)
# Of the plain peak.
BUDGET_PART = 0.6


@dataclass(frozen=True, slots=True)
class Trial:
    """What is tried, where, and what it takes plain. `plain_peak_bytes` is 0 before that is known. Of a `small`
    workload everything is offloaded, through small windows."""

    place: StepPlace
    workload: Workload
    plain_peak_bytes: int = 0
    small: bool = False

    @property
    def budget_bytes(self) -> int:
        return int(BUDGET_PART * self.plain_peak_bytes)


@dataclass(frozen=True, slots=True)
class StepWay:
    """`settling_steps` run before any counts: libraries load, memory is pinned, a plan is made."""

    name: str
    settling_steps: int
    open: Callable[[Trial], contextlib.AbstractContextManager[Session | None]]
    has_budget: bool = False


@contextlib.contextmanager
def _plain(trial: Trial) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _save_on_cpu(trial: Trial, *, pin_memory: bool) -> Iterator[None]:
    with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
        yield


@contextlib.contextmanager
def _checkpointing(trial: Trial) -> Iterator[None]:
    model = trial.workload.model
    blocks = [module for module in model.modules() if isinstance(module, BLOCKS)]
    if not blocks:
        raise ValueError(f"checkpointing: expected blocks in {type(model).__name__}, found none")
    for block in blocks:
        # An instance's own attribute goes before its class's method.
        recomputed = functools.partial(checkpoint, block.forward, use_reentrant=False)
        object.__setattr__(block, "forward", recomputed)
    try:
        yield
    finally:
        for block in blocks:
            object.__delattr__(block, "forward")


@contextlib.contextmanager
def _offloading(trial: Trial, *, policy: str, has_budget: bool, measure: bool) -> Iterator[Session]:
    sizes: dict[str, Any] = (
        {"min_bytes": 0, "offload_window": "64KiB", "reload_window": "128KiB"} if trial.small else {}
    )
    session = vdnn.offload(
        policy,
        budget=trial.budget_bytes if has_budget else None,
        device=trial.place.vdnn_device,
        host_budget=HOST_BUDGET,
        measure=measure,
        **sizes,
    )
    try:
        with session:
            yield session
    finally:
        session.close()  # at once: its pinned memory is wanted again


def _vdnn(name: str, policy: str, *, has_budget: bool = False, measure: bool = True) -> StepWay:
    """Under a budget the third step is the first that follows the plan."""
    opened = functools.partial(_offloading, policy=policy, has_budget=has_budget, measure=measure)
    return StepWay(name, 3, opened, has_budget)


PLAIN = StepWay("plain", 2, _plain)
# Without pinned memory a step takes many seconds: the first counts.
PAGEABLE = StepWay("save_on_cpu, pageable", 0, functools.partial(_save_on_cpu, pin_memory=False))
PINNED = StepWay("save_on_cpu, pinned", 1, functools.partial(_save_on_cpu, pin_memory=True))
CHECKPOINTING = StepWay("block checkpointing", 1, _checkpointing)
VDNN_ALL = _vdnn("vdnn-all", "vdnn-all")
# What measuring costs.
VDNN_ALL_UNMEASURED = _vdnn("vdnn-all, not measured", "vdnn-all", measure=False)
VDNN_CONV = _vdnn("vdnn-conv", "vdnn-conv")
VDNN_BUDGET = _vdnn(f"vdnn, budget {BUDGET_PART:.0%}", "auto", has_budget=True)
# Plain goes first, because others are compared with it; what takes longest goes last.
STEP_WAYS = (PLAIN, CHECKPOINTING, VDNN_ALL, VDNN_ALL_UNMEASURED, VDNN_CONV, VDNN_BUDGET, PINNED, PAGEABLE)
