"""Turns a simulated step of a training into the rows, the memory and the spans of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vdnn.planning.training.cycle import ByteClass, cycle_of
from vdnn.planning.training.placement import Activations, Placement, State, UnitPlacement
from vdnn.planning.training.simulate_cycle import TrainingStep
from vdnn.planning.training.training import Training, Unit
from vdnn.report.training_report import BusySpan, PlacedUnits, TaskMemory
from vdnn.runtime.rehearsal.measured_units import UnitParameter
from vdnn.step.training_plan import PlacedParameter

_ACTIVATIONS = {
    Activations.KEEP: "kept",
    Activations.OFFLOAD: "offloaded",
    Activations.RECOMPUTE: "recomputed",
    Activations.RECOMPUTE_FROM_HOST: "recomputed, input offloaded",
}
_STATE = {
    State.DEVICE: "on the device",
    State.HOST: "on the host, steps on the device",
    State.CPU: "on the host, steps on the CPU",
}


def placed_units(training: Training, placement: Placement) -> tuple[PlacedUnits, ...]:
    """One row for each kind of unit and its placement, in the order of the first of them."""
    cycle = cycle_of(training, placement)
    to_device, to_host = [0] * len(training.units), [0] * len(training.units)
    for move in cycle.ins:
        to_device[move.unit] += move.nbytes
    for move in cycle.outs:
        to_host[move.unit] += move.nbytes
    # A gradient whose step is right behind it never leaves, even if it may.
    leaving = {move.unit for move in cycle.outs if move.byte_class is ByteClass.GRADIENT}
    rows: dict[tuple[object, UnitPlacement], list[int]] = {}
    for index, (unit, one) in enumerate(zip(training.units, placement.units, strict=True)):
        shown = _without_idle(unit, one)
        if index not in leaving:
            shown = replace(shown, gradient_leaves=shown.state is State.CPU)
        # Blocks at the ends differ a little in their transients: such a difference makes no row of its own.
        alike = replace(unit, name="", forward_transient_bytes=0, backward_transient_bytes=0, boundary_bytes=0)
        near = replace(
            alike,
            saved_bytes=round(unit.saved_bytes, -8),
            forward_ns=0,
            backward_ns=0,
            forward_issue_ns=0,
            backward_issue_ns=0,
            step_issue_ns=0,
        )
        rows.setdefault((near, shown), []).append(index)
    return tuple(
        PlacedUnits(
            names=_names([training.units[index].name for index in members]),
            count=len(members),
            parameter_bytes=sum(training.units[index].parameter_bytes for index in members),
            gradient_bytes=sum(training.units[index].gradient_bytes for index in members),
            state_bytes=sum(training.units[index].state_bytes for index in members),
            saved_bytes=sum(training.units[index].saved_bytes for index in members),
            activations=_ACTIVATIONS[one.activations],
            parameters="streamed" if one.streams else "on the device",
            gradients="on the host" if one.gradient_leaves else "on the device",
            optimizer=_STATE[one.state],
            to_device_bytes=sum(to_device[index] for index in members),
            to_host_bytes=sum(to_host[index] for index in members),
        )
        for (_, one), members in rows.items()
    )


def placed_parameters(
    placement: Placement, parameters: Sequence[Sequence[UnitParameter]]
) -> tuple[PlacedParameter, ...]:
    """Says what leaves of each parameter of each unit. Parameters that several units use stay.
    Empty for a training whose units are not those of the rehearsal."""
    if len(placement.units) != len(parameters):
        return ()
    return tuple(
        PlacedParameter(
            one.name,
            one.nbytes,
            streams=unit.streams and not one.is_shared,
            gradient_leaves=unit.gradient_leaves and bool(one.gradient_bytes),
            state_leaves=unit.state is not State.DEVICE and bool(one.state_bytes),
        )
        for unit, several in zip(placement.units, parameters, strict=True)
        for one in several
    )


def task_memory(step: TrainingStep) -> tuple[TaskMemory, ...]:
    """The bytes on the device, task by task."""
    return tuple(
        TaskMemory(
            task=name,
            parameter_bytes=needed[ByteClass.PARAMETER],
            gradient_bytes=needed[ByteClass.GRADIENT],
            state_bytes=needed[ByteClass.STATE],
            activation_bytes=needed[ByteClass.ACTIVATION],
            transient_bytes=needed[ByteClass.TRANSIENT],
            moving_bytes=held - sum(needed.values()),
        )
        for name, needed, held in zip(step.task_names, step.needed, step.held, strict=True)
    )


def busy_spans(training: Training, step: TrainingStep) -> tuple[BusySpan, ...]:
    """The spans of all resources. A copy moves its bytes once in the host's memory; a step on the CPU what it reads and
    writes."""
    cycle = cycle_of(training, step.placement)
    copied: dict[tuple[str, str], list[int]] = {}
    for move in (*cycle.ins, *cycle.outs):
        name = f"{move.byte_class.value} of {training.units[move.unit].name}"
        copied.setdefault(("to host" if move.is_out else "to device", name), []).append(move.nbytes)
    steps = {f"step of {unit.name}": unit.host_step_bytes for unit in training.units}
    spans = []
    for one in step.spans:
        sizes = copied.get((one.row, one.name), [0])
        nbytes = steps.get(one.name, 0) if one.row == "cpu" else sum(sizes) // len(sizes)
        nbytes = 0 if one.row == "device" else nbytes
        spans.append(BusySpan(one.row, one.name, round(one.begin_ns), round(one.end_ns), nbytes))
    return tuple(spans)


def _without_idle(unit: Unit, one: UnitPlacement) -> UnitPlacement:
    """The placement of a unit, less the choices for bytes that the unit does not have."""
    if not unit.gradient_bytes:
        one = replace(one, gradient_leaves=False, state=State.DEVICE)
    if one.activations is Activations.RECOMPUTE_FROM_HOST and not unit.boundary_bytes:
        one = replace(one, activations=Activations.RECOMPUTE)
    if not unit.parameter_bytes:
        one = replace(one, streams=False)
    return one if unit.saved_bytes else replace(one, activations=Activations.KEEP)


def _names(names: list[str]) -> str:
    """`layers.0, 2-5, 7` for blocks of one stack, otherwise the first and how many more there are."""
    stems = {name.rpartition(".")[0] for name in names}
    numbers = [name.rpartition(".")[2] for name in names]
    if len(names) == 1:
        return names[0]
    if len(stems) > 1 or not all(number.isdigit() for number in numbers):
        return f"{names[0]} and {len(names) - 1} more"
    runs: list[list[int]] = []
    for number in sorted(map(int, numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    stem = f"{stems.pop()}." if "." in names[0] else ""
    if len(runs) > 6:
        return f"{stem}*, {len(names)} of them"
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{stem}{shown}"
