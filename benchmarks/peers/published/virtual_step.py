"""One training in one way on a virtual machine: the time of its step and its memory; and vdnn's step at that peak."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.published.optimizers import paging_ns
from benchmarks.peers.published.trainings import Program, Training, make
from benchmarks.peers.published.ways import WAYS
from vdnn.errors import BudgetError
from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.planned_step import plan_step
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.rehearsal import Subject, rehearse
from vdnn.runtime.rehearsal.stage import stage
from vdnn.runtime.rehearsal.subjects import Staged
from vdnn.step.recording import Recording


@dataclass(frozen=True, slots=True)
class VirtualStep:
    """`before_bytes` are allocated before the step, `forward_bytes` between the trunk and the loss."""

    step_ns: int
    peak_bytes: int
    before_bytes: int
    forward_bytes: int


def virtual_step(training: Training, card: str, way: str) -> VirtualStep:
    """The first step. The optimizer's state is there before it, and the step leaves its gradients."""
    with VirtualMachine(card, workspaces=True) as machine, stage(machine):
        program = make(training)
        machine.tracker.track([program.model, program.inputs, program.labels])
        forward_bytes = 0

        def at_loss() -> None:
            nonlocal forward_bytes
            forward_bytes = machine.allocated_bytes

        program.at_loss = at_loss
        program.around_forward = WAYS[way](program.model, (training.shape.block,), machine)
        before_bytes, begin_ns = machine.allocated_bytes, machine.now_ns
        machine.reset_peak()
        program.step()
        step_ns = machine.now_ns - begin_ns + paged_ns(program, card)
        return VirtualStep(step_ns, machine.peak_bytes, before_bytes, forward_bytes)


def paged_ns(program: Program, card: str) -> int:
    """The time of paging the optimizer's state, if it is paged."""
    if not program.training.pages_state:
        return 0
    return paging_ns(load_profile(card), sum(one.numel() for one in program.model.parameters()))


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step with everything kept, as vdnn plans it, and what it takes beside that."""

    recording: Recording
    paged_ns: int

    def planned_ns(self, card: str, budget_bytes: int) -> int | None:
        """The step of vdnn's plan within that memory, or None if it needs more."""
        costs = profile_costs(load_profile(card))
        try:
            planned = plan_step(self.recording, costs, budget_bytes, "auto")
        except BudgetError:
            return None
        return planned.timeline.step_ns + self.paged_ns


def recorded(training: Training, card: str) -> Recorded:
    pages_ns = 0

    def staged() -> Staged:
        nonlocal pages_ns
        program = make(training)
        pages_ns = paged_ns(program, card)
        return Staged(program.model, program.step, (program.inputs, program.labels))

    return Recorded(rehearse(Subject(staged), load_profile(card)).recording, pages_ns)
