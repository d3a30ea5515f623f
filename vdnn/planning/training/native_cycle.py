"""The native form of a cycle, which the search simulates: it answers with the time of a step, and nothing else.

simulate_cycle.py and room.py are the same algorithms in Python, and say what runs when. Tests compare both.
"""

from __future__ import annotations

from vdnn import _C
from vdnn.planning.training.cycle import ByteClass, Cycle, TaskKind
from vdnn.planning.training.training import Training, TrainingMachine

_KINDS = {TaskKind.FORWARD: 0, TaskKind.BACKWARD: 1, TaskKind.STEP: 2}


def step_ns_of(training: Training, machine: TrainingMachine, cycle: Cycle, budget_bytes: int) -> int:
    """The time of a step whose moves have no release or issue yet. The cycle is not changed."""
    places = {id(move): index for index, move in enumerate(cycle.outs)}
    link = machine.link
    rates = (
        link.to_device_bytes_per_s / 1e9,
        link.to_host_bytes_per_s / 1e9,
        link.duplex_bytes_per_s / 1e9,
        machine.host_bytes_per_s / 1e9,
        machine.cpu_bytes_per_s / 1e9,
        float(link.latency_ns),
    )
    outs = [
        (one.nbytes, one.task, one.bound, one.unit, -1, True, False, one.feeds_step, one.byte_class is _PARAMETER)
        for one in cycle.outs
    ]
    ins = [
        (
            one.nbytes,
            one.task,
            one.earliest,
            one.unit,
            -1 if one.brings_back is None else places[id(one.brings_back)],
            one.takes_room,
            one.follows_step,
            False,
            False,
        )
        for one in cycle.ins
    ]
    return round(
        _C.training_step_ns(
            kinds=[_KINDS[task.kind] for task in cycle.tasks],
            durations_ns=[task.duration_ns for task in cycle.tasks],
            needed_bytes=cycle.needed_bytes,
            outs=outs,
            ins=ins,
            cpu_steps=[(unit, training.units[unit].host_step_bytes) for unit in cycle.cpu_steps],
            units=len(training.units),
            overlap=cycle.overlap,
            linger=cycle.linger,
            linger_saves=cycle.linger_saves,
            clips=training.clips,
            waits=cycle.waits,
            stale=cycle.stale,
            rates=rates,
            budget_bytes=budget_bytes,
        )
    )


_PARAMETER = ByteClass.PARAMETER
