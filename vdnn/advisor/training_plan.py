"""Advises to keep optimizer state, gradients or parameters on the host, from a plan of the whole training.

The plan chooses unit by unit. A line of vdnn.offload moves a class of bytes as a whole, so each line that a plan leads
to is simulated as it is, on the same rehearsed units, and the fastest that fits is advised.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from vdnn.advisor.advice import Advice, Basis, Gain, Kind
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.bytesize import format_bytes
from vdnn.errors import BudgetError, InvalidArgumentError
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.placement import Placement, State, UnitPlacement, all_alike
from vdnn.planning.training.simulate_cycle import TrainingStep, simulate_training
from vdnn.planning.training.training import Training
from vdnn.runtime.rehearsal.rehearsed_training import RehearsedTraining
from vdnn.runtime.rehearsal.training_ahead import Terms, searched_placement, terms_of

_PLANNED = "a plan of the whole training, as of vdnn.plan_training"


def training_plan(evidence: Evidence) -> list[Advice]:
    """Advice for a step that does not fit. Activations alone are the subject of other kinds of advice."""
    form = evidence.base.optimizer
    if evidence.fits or form is None or form.name == torch.optim.LBFGS.__name__:
        return []
    rehearsed, terms = evidence.rehearsed_training(), _terms(evidence)
    training, budget_bytes = rehearsed.training, evidence.budget_bytes
    kept = all_alike(training, UnitPlacement())
    # The rehearsed peak is higher if it has temporaries of an optimizer's step, which slices of its state have not.
    kept_bytes = max(evidence.base.peak_bytes, *cycle_of(training, kept).needed_bytes)
    steps = _fitting_steps(rehearsed, terms, budget_bytes)
    if not steps:
        return []
    words, step = min(steps, key=lambda one: one[1].step_ns)
    gain = Gain(
        Basis.PREDICTED,
        _PLANNED,
        before_ns=training.computing_ns,
        after_ns=step.step_ns,
        before_bytes=kept_bytes,
        after_bytes=step.peak_bytes,
    )
    slower = 100 * (step.step_ns / training.computing_ns - 1)
    seen = (
        f"{' and '.join(words)} to the host: {format_bytes(gain.saved_bytes)} less, {slower:.1f} % slower, with "
        f"{format_bytes(step.host_bytes)} of host memory. Everything on the device takes {format_bytes(kept_bytes)} of "
        f"{format_bytes(budget_bytes)}."
    )
    return [Advice(Kind.TRAINING_PLAN, seen, _line(words, budget_bytes), gain)]


def _terms(evidence: Evidence) -> Terms:
    # A profile without a host is that of this machine, or of a card so old that its host is not known.
    has_host = "memory_bytes" in evidence.profile.host
    host = None if has_host else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return terms_of(evidence.profile, budget=evidence.budget_bytes, host=host)


def _fitting_steps(
    rehearsed: RehearsedTraining, terms: Terms, budget_bytes: int
) -> list[tuple[tuple[str, ...], TrainingStep]]:
    """The simulated step of each line that fits the card and the host, with the classes of bytes that it moves."""
    training = rehearsed.training
    try:
        planned = searched_placement(rehearsed, terms, budget_bytes)
    except (BudgetError, InvalidArgumentError) as refused:
        raise NotSeen(f"no plan of the whole training fits: {refused}") from refused
    kept = all_alike(training, UnitPlacement())
    found = []
    for start in (kept, planned):
        for whole in _lines(training, start):
            step = simulate_training(training, terms.machine, whole, budget_bytes)
            if step.peak_bytes <= budget_bytes and step.host_bytes <= terms.machine.host_bytes:
                found.append((_classes(training, whole), step))
    return found


def _lines(training: Training, placement: Placement) -> list[Placement]:
    """The placement with whole classes away: the state, then gradients too, then parameters too."""
    learns = [unit.gradient_bytes > 0 for unit in training.units]
    units = [
        replace(one, streams=False, gradient_leaves=False, state=State.HOST if trained else State.DEVICE)
        for one, trained in zip(placement.units, learns, strict=True)
    ]
    with_gradients = [replace(one, gradient_leaves=trained) for one, trained in zip(units, learns, strict=True)]
    streamed = [
        replace(one, streams=unit.parameter_bytes > 0) for one, unit in zip(with_gradients, training.units, strict=True)
    ]
    return [replace(placement, units=tuple(one)) for one in (units, with_gradients, streamed)]


def _classes(training: Training, placement: Placement) -> tuple[str, ...]:
    units = placement.units
    kinds = [one.activations for one in units if one.activations.value != "keep"]
    words = ["optimizer state"]
    words += ["gradients"] if any(one.gradient_leaves for one in units) else []
    words += ["parameters"] if any(one.streams for one in units) else []
    return (*words, *(["activations"] if kinds else []))


def _line(words: tuple[str, ...], budget_bytes: int) -> str:
    options = ["model=model", "optimizer=optimizer"]
    options += ["gradients=True"] if "gradients" in words else []
    options += ['parameters="all"'] if "parameters" in words else []
    options.insert(0, f'budget="{budget_bytes // 2**20}MiB"')
    return f"with vdnn.offload({', '.join(options)}): around the training loop"
