"""Makes a Training from a rehearsed step: its units with their bytes and times, as plans of whole trainings take them.

The step runs without data on a virtual machine, once, or twice if the subject brings an optimizer, whose state is made
in the first step. measured_units.py makes the units. The state of an optimizer that is named is that of its first step.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, fields, replace

import torch

from vdnn.hardware import HardwareProfile, HostFigures
from vdnn.planning.training.training import Training, Unit
from vdnn.report.training_report import RankShare
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.logits import LogitsWatch
from vdnn.runtime.rehearsal.measured_units import Held, ParameterState, UnitParameter, training_of_marks
from vdnn.runtime.rehearsal.rehearsal import OPTIMIZERS
from vdnn.runtime.rehearsal.stage import stage
from vdnn.runtime.rehearsal.subjects import Staged, Subject, held_by, optimizers_of
from vdnn.runtime.rehearsal.unit_marks import MarkedStep, UnitWatch
from vdnn.runtime.rehearsal.unit_modules import blocks_of
from vdnn.runtime.rehearsal.user_code import user_code


@dataclass(frozen=True, slots=True)
class RehearsedTraining:
    """A training, and what was seen in the rehearsal: the peak of one forward and backward pass with everything kept,
    beside that of the training's cycle, both without state that the rehearsal did not have. `blocks` are the numbers of
    the units that are repeated blocks, `parameters` those of each unit. `rank` is set if the training is that of
    one rank."""

    training: Training
    rehearsed_peak_bytes: int
    cycle_peak_bytes: int
    blocks: tuple[int, ...]
    stand_ins: tuple[str, ...] = ()
    parameters: tuple[tuple[UnitParameter, ...], ...] = ()
    rank: RankShare | None = None


def rehearse_training(
    subject: Subject,
    profile: HardwareProfile,
    *,
    name: str,
    optimizer: str | None = None,
    master_weights: bool = False,
    micro_batches: int | None = None,
    clips: bool | None = None,
    host: HostFigures | None = None,
    loss_chunks: int = 0,
) -> RehearsedTraining:
    """Rehearses one micro-batch of `subject` and makes a training of it.

    * `optimizer`: the name of one, for a subject that has none.
    * `master_weights`: the optimizer keeps its state, and copies of the parameters, in float32.
    * `micro_batches`: the number of passes before each step. Default: as many as the subject's own step has.
    * `clips`: whether gradients are clipped by their norm. Default: whether the subject's own step does that.
    * `host`: the units have the time in which this host issues them.
    * `loss_chunks`: the logits of a cross entropy are made in this many chunks, as torch's LinearCrossEntropyLoss does.
    """
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer: expected one of {', '.join(map(repr, OPTIMIZERS))}, got {optimizer!r}.")
    with VirtualMachine(profile, host=host, workspaces=True) as machine, stage(machine) as values:
        staged = subject.make()
        machine.tracker.track([staged.model, *held_by(staged)])
        own = optimizers_of(staged)
        if own and optimizer is not None:
            raise ValueError(f"optimizer: expected none, because the function returns one, got {optimizer!r}.")
        if not own and optimizer is None:
            raise ValueError(
                "optimizer: expected the name of one, because the function returns none, got None. A plan of a whole "
                "training places its state."
            )
        blocks = blocks_of(staged.model)
        watch = UnitWatch(machine, staged.model, blocks)
        logits = LogitsWatch()
        for number in range(2 if own or loss_chunks else 1):
            values.stand_ins.begin_step()
            before = _gradient_storages(staged.model)
            if number and loss_chunks:
                logits.replace_in(loss_chunks)
            logits.begin_step()
            with watch.watch() as marks, logits if loss_chunks else nullcontext():
                staged.step()
                if staged.optimizer is not None:
                    _step(staged.optimizer)
            if staged.program is None:
                staged.model.zero_grad(set_to_none=True)
        held = _held(staged, own, optimizer, marks, before, master_weights=master_weights)
    training, cycle_peak_bytes, parameters = training_of_marks(
        name,
        marks,
        held,
        profile,
        micro_batches=max(1, marks.passes) if micro_batches is None else micro_batches,
        clips=marks.clips if clips is None else clips,
    )
    names = {block.name for block in blocks}
    full = [i for i, unit in enumerate(training.units) if not _is_empty(unit)] or list(range(len(training.units)))
    units = tuple(training.units[i] for i in full)
    return RehearsedTraining(
        replace(training, units=units),
        max(max(unit.forward_peak_bytes, unit.backward_peak_bytes) for unit in marks.units),
        cycle_peak_bytes,
        tuple(i for i, unit in enumerate(units) if unit.name in names),
        tuple(map(str, values.stand_ins.given)),
        tuple(parameters[i] for i in full),
    )


def _is_empty(unit: Unit) -> bool:
    """True for a unit around the blocks in which nothing happens: it has no bytes and takes no time."""
    return not any(getattr(unit, field.name) for field in fields(unit)[1:])


def _step(optimizer: torch.optim.Optimizer) -> None:
    with user_code("calling the optimizer's step()"):
        optimizer.step()


def _held(
    staged: Staged,
    own: list[torch.optim.Optimizer],
    optimizer: str | None,
    marks: MarkedStep,
    before: dict[int, int],
    *,
    master_weights: bool,
) -> Held:
    parameters = list(staged.model.parameters())
    trained = [one for one in parameters if id(one) in marks.gradients]
    if master_weights and not any(one.dtype in (torch.bfloat16, torch.float16) for one in trained):
        kinds = ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in trained}))
        raise ValueError(
            f"master_weights: expected trained parameters in bfloat16 or float16, got {kinds or 'none'}. Parameters in "
            "float32 need no master weights."
        )
    if optimizer is not None:
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        own = [OPTIMIZERS[optimizer](trained)]
        _step(own[0])
    after_first = marks.units[1].live if len(marks.units) > 1 else marks.units[0].live
    return Held(
        parameters,
        _states(own, trained, marks),
        master_weights,
        sum(before.values()),
        sum(nbytes for key, nbytes in before.items() if key not in after_first),
        {id(one): name for name, one in staged.model.named_parameters()},
    )


def _states(
    optimizers: list[torch.optim.Optimizer], trained: list[torch.nn.Parameter], marks: MarkedStep
) -> dict[int, ParameterState]:
    """The state of each trained parameter. Parameters of an optimizer that are not the model's are master copies: each
    belongs to the first trained parameter of its shape that has no state."""
    found: dict[int, ParameterState] = {}
    known = {id(one) for one in trained}
    stepped = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    state_of = {id(one): state for optimizer in optimizers for one, state in optimizer.state.items()}
    waiting = [one for one in trained if all(one is not other for other in stepped)] if len(stepped) else []
    for parameter in stepped:
        tensors = [one for one in state_of.get(id(parameter), {}).values() if isinstance(one, torch.Tensor)]
        owner = parameter
        if id(parameter) not in known:
            index = next((i for i, one in enumerate(waiting) if one.shape == parameter.shape), None)
            if index is None:
                continue
            owner = waiting.pop(index)
            tensors.append(parameter)
        alike = [one for one in tensors if one.shape == parameter.shape]
        nbytes = sum(one.untyped_storage().nbytes() for one in tensors)
        live = marks.units[0].live
        found[id(owner)] = ParameterState(
            nbytes=nbytes,
            alike=sum(one.numel() for one in alike),
            other_bytes=nbytes - sum(one.untyped_storage().nbytes() for one in alike),
            held_bytes=sum(one.untyped_storage().nbytes() for one in tensors if one.untyped_storage()._cdata in live),
        )
    return found


def _gradient_storages(model: torch.nn.Module) -> dict[int, int]:
    storages = [one.grad.untyped_storage() for one in model.parameters() if one.grad is not None]
    return {storage._cdata: storage.nbytes() for storage in storages}
