"""The two headline trainings: Llama-3.1-8B in full on an RTX 4090, and LoRA of Llama-3.1-70B on an RTX 5090."""

from __future__ import annotations

from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from benchmarks.whole_state.cells import FREE
from benchmarks.whole_state.decoders import Decoder, model_named, recomputed_ns, training_of
from benchmarks.whole_state.machines import MACHINES, Machine
from vdnn.errors import BudgetError, InvalidArgumentError
from vdnn.planning.published.whole_state import WHOLE_STATE_POLICIES
from vdnn.planning.training.auto_placement import auto_placement
from vdnn.planning.training.cycle import cycle_of
from vdnn.planning.training.placement import EXACT, Activations, Allowed, State, UnitPlacement, all_alike
from vdnn.planning.training.simulate_cycle import TrainingStep, simulate_training
from vdnn.planning.training.training import Training
from vdnn.planning.training.training_bound import training_bound

_STEP = 4096  # tokens: a sequence
_MICRO_BATCHES = (1, 4)
_FREEDOMS = (
    ("exact, clipped", True, EXACT),
    ("exact, clipped, deferred", True, Allowed(deferred=True)),
    ("exact, not clipped, in backward", False, Allowed(deferred=True, in_backward=True)),
    ("steps on the CPU, clipped, deferred", True, FREE),
)


def headlines() -> str:
    full, lora = model_named("Llama-3.1-8B"), model_named("Llama-3.1-70B LoRA")
    consumer, newer = MACHINES[0], MACHINES[1]
    parts = [
        _table(full, consumer, 16_384, _MICRO_BATCHES),
        f"Largest micro-batch of {full.name} on {consumer.name}: {largest_tokens(full, consumer)} tokens.",
        _table(lora, newer, 4096, (1,), _FREEDOMS[:1]),
        f"Largest micro-batch of {lora.name} on {newer.name}: {largest_tokens(lora, newer)} tokens.",
    ]
    return "\n\n".join(parts)


def largest_tokens(model: Decoder, machine: Machine) -> int:
    """The most tokens in one micro-batch with everything away that can be, in whole sequences."""
    away = UnitPlacement(Activations.RECOMPUTE_FROM_HOST, True, True, State.HOST)
    tokens = 0
    while True:
        training = training_of(model, machine, tokens + _STEP)
        cycle = cycle_of(training, all_alike(training, away))
        host_bytes = machine.training_machine.host_bytes
        if max(cycle.needed_bytes) > machine.card_bytes or cycle.host_bytes > host_bytes:
            return tokens
        tokens += _STEP


def _table(
    model: Decoder,
    machine: Machine,
    tokens: int,
    micro_batches: tuple[int, ...],
    freedoms: tuple[tuple[str, bool, Allowed], ...] = _FREEDOMS,
) -> str:
    rows: list[tuple[str, ...]] = []
    progress = Progress(model.name, len(micro_batches) * len(freedoms))
    for count in micro_batches:
        for name, clips, allowed in freedoms:
            progress.begin(f"{name}, {count} micro-batches; so far {rows[-1:]}")
            training = training_of(model, machine, tokens, count, clips=clips)
            try:
                step = auto_placement(training, machine.training_machine, machine.card_bytes, allowed)
            except (BudgetError, InvalidArgumentError):
                continue
            bound_ns = training_bound(training, machine.training_machine, machine.card_bytes, allowed)
            rows.append(_row(f"auto, {name}", training, step, f"{bound_ns / training.computing_ns:.3f}"))
    for policy in WHOLE_STATE_POLICIES:
        for count in micro_batches:
            training = training_of(model, machine, tokens, count)
            placement = policy.place(training, machine.training_machine, machine.card_bytes)
            if placement is not None:
                step = simulate_training(training, machine.training_machine, placement, machine.card_bytes)
                rows.append(_row(policy.name, training, step, ""))
    header = ("plan", "micro-batches", "step s", "/ computing", "/ recomputing", "bound / computing", "host GB")
    remarks = ["Computing recomputes nothing; recomputing runs forward twice, as with a checkpoint at every block."]
    title = f"{model.name}, {tokens} tokens a step, {machine.name}, whole card, virtual time"
    return render_table(title, header, rows, remarks)


def _row(name: str, training: Training, step: TrainingStep, bound: str) -> tuple[str, ...]:
    computing_ns, again_ns = training.computing_ns, recomputed_ns(training)
    ratios = (f"{step.step_ns / computing_ns:.3f}", f"{step.step_ns / (computing_ns + again_ns):.3f}")
    seconds, host = f"{step.step_ns / 1e9:.2f}", f"{step.host_bytes / 1e9:.0f}"
    return (name, str(training.micro_batches), seconds, *ratios, bound, host)
