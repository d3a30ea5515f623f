"""vdnn.advise: examines a training for every kind of advice, and returns what would make it faster or smaller."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from vdnn.advisor.advice import Advice, Advices, Gain, Kind, NotExamined
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.advisor.host_reads import HostReads
from vdnn.advisor.loader import loader_workers, pinned_memory
from vdnn.advisor.loop_training import LoopTraining, Loss, Step
from vdnn.advisor.memory import accumulation, checkpointing, largest_batch, offloading
from vdnn.advisor.observation import Observed, observe
from vdnn.advisor.parts import ExaminedTraining
from vdnn.advisor.step_advice import (
    biases_before_norms,
    channels_last,
    chunked_loss,
    cudnn_benchmark,
    debugging,
    filled_gradients,
    fused_form,
    host_waits,
    mixed_precision,
    state_in_8_bits,
    tf32_products,
)
from vdnn.advisor.training_plan import training_plan
from vdnn.advisor.virtual_step import VirtualStep
from vdnn.hardware import HardwareProfile, load_profile
from vdnn.planning.budget import parse_budget
from vdnn.runtime.torch_internals.random_state import random_state_kept

EXAMINERS: dict[Kind, Callable[[Evidence], list[Advice]]] = {
    Kind.AMP: mixed_precision,
    Kind.TF32: tf32_products,
    Kind.OPTIMIZER_FORM: fused_form,
    Kind.OPTIMIZER_STATE: state_in_8_bits,
    Kind.BIAS_BEFORE_NORM: biases_before_norms,
    Kind.CHUNKED_LOSS: chunked_loss,
    Kind.SET_TO_NONE: filled_gradients,
    Kind.LARGEST_BATCH: largest_batch,
    Kind.TRAINING_PLAN: training_plan,
    Kind.OFFLOAD: offloading,
    Kind.CHECKPOINTING: checkpointing,
    Kind.ACCUMULATION: accumulation,
    Kind.LOADER_WORKERS: loader_workers,
    Kind.PINNED_MEMORY: pinned_memory,
    Kind.HOST_SYNC: host_waits,
    Kind.DEBUGGING: debugging,
    Kind.CHANNELS_LAST: channels_last,
    Kind.CUDNN_BENCHMARK: cudnn_benchmark,
}


def advise(
    model: torch.nn.Module,
    loader: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    loss: Loss | None = None,
    *,
    step: Step | None = None,
    steps: int = 3,
    hardware: str | os.PathLike[str] | HardwareProfile | None = None,
    budget: int | str | None = None,
    name: str | None = None,
    on_progress: Callable[[str], None] = lambda doing: None,
) -> Advices:
    """Find changes that would make this training faster or smaller, using only facts that were observed in it.

    `steps` real steps run on copies, on the device of the model. Then a step is rehearsed without data on `hardware`,
    unchanged and with each change. `hardware` is as in vdnn.plan; None means the GPU of this machine, or "h100" if it
    has none. Pass `loss(output, target)`, or `loss(output)` if a batch has no target, or pass
    `step(model, optimizer, batch)`, which does a whole step and is watched. `budget` is the part of the card's memory
    that a step may take. The model, the optimizer, the loader and all random states are unchanged afterwards. Other
    objects that `step` changes are not restored.

        print(vdnn.advise(model, loader, optimizer, nn.CrossEntropyLoss()))
    """
    if type(steps) is not int or steps < 0:
        raise ValueError(f"steps: expected a number of steps, 0 or more, got {steps!r}.")
    profile = profile_for(hardware)
    _budget_bytes(budget, profile)  # refuse a wrong budget before any step runs
    training = LoopTraining(model, loader, optimizer, loss, step=step, name=name)
    host_reads = HostReads()
    on_progress("running real steps" if steps else "taking a batch")
    with settings_kept(optimizer):
        observed = observe(training, steps, host_reads)
        return examine(
            training, profile, budget=budget, observed=observed, host_reads=host_reads, on_progress=on_progress
        )


def examine(
    training: ExaminedTraining,
    profile: HardwareProfile,
    *,
    budget: int | str | None = None,
    observed: Observed | None = None,
    host_reads: HostReads | None = None,
    on_progress: Callable[[str], None] = lambda doing: None,
) -> Advices:
    """Examine every kind of advice. The result names each kind that could not be examined, with the reason."""
    budget_bytes = _budget_bytes(budget, profile)
    evidence = Evidence(
        training,
        profile,
        budget_bytes=budget_bytes,
        observed=observed,
        host_reads=host_reads,
        on_progress=on_progress,
    )
    found: list[Advice] = []
    examined: list[Kind] = []
    not_examined: list[NotExamined] = []
    with random_state_kept():
        for kind, examiner in EXAMINERS.items():
            try:
                found += examiner(evidence)
            except NotSeen as missing:
                not_examined.append(NotExamined(kind, str(missing)))
            else:
                examined.append(kind)
        step = _base_or_none(evidence)
    found = [replace(advice, makes_it_fit=_makes_it_fit(advice.gain, budget_bytes)) for advice in found]
    on_progress("")
    return Advices(
        name=training.name,
        batch=training.batch,
        hardware=profile.name,
        budget_bytes=budget_bytes,
        step_ns=None if step is None else step.step_ns,
        peak_bytes=None if step is None else step.peak_bytes,
        device="" if observed is None else observed.device,
        real_steps=0 if observed is None else observed.steps,
        found=tuple(sorted(found, key=lambda advice: advice.rank)),
        examined=tuple(examined),
        not_examined=tuple(not_examined),
    )


def _budget_bytes(budget: int | str | None, profile: HardwareProfile) -> int:
    if budget is None:
        return profile.memory_bytes
    wanted = parse_budget(budget)
    if wanted.nbytes is None and wanted.share is None:
        raise ValueError('budget: expected bytes such as "12GiB" or a share such as "80%" to advise for, got "min".')
    return wanted.bytes_for(profile.memory_bytes, 0)


def _makes_it_fit(gain: Gain, budget_bytes: int) -> bool:
    if gain.before_bytes is None or gain.after_bytes is None:
        return False
    return gain.after_bytes <= budget_bytes < gain.before_bytes


def _base_or_none(evidence: Evidence) -> VirtualStep | None:
    try:
        return evidence.base
    except NotSeen:
        return None


def profile_for(hardware: str | os.PathLike[str] | HardwareProfile | None) -> HardwareProfile:
    if isinstance(hardware, HardwareProfile):
        return hardware
    if hardware == "measured" or (hardware is None and torch.cuda.is_available()):
        from vdnn.runtime.machine.measured_hardware import measured_profile

        return measured_profile()
    return load_profile("h100" if hardware is None else hardware)


# Restores the settings of an optimizer, which a user's step may change: a scheduler changes the original optimizer.


@contextlib.contextmanager
def settings_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore all settings of each group on exit, also after an exception. Ignores the warning of schedulers, which
    count the steps of the original while only copies step."""
    before = [{name: _held(one) for name, one in group.items() if name != "params"} for group in optimizer.param_groups]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step\\(\\)` before", UserWarning)
            yield
    finally:
        for group, settings in zip(optimizer.param_groups, before, strict=False):
            for name, value in settings.items():
                if isinstance(value, torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value


def _held(value: object) -> object:
    """A copy of a setting. A learning rate may be a tensor, which is written in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
