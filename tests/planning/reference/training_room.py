"""The readable form of csrc/planning/training_room.cpp: when the moves of a cycle take and give back their memory.

[Note: Order of choice] in csrc/planning/training_cycle.h says in which order moves get room.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter

from vdnn.planning.training.cycle import Cycle, Move, TaskKind
from vdnn.planning.training.placement import Placement
from vdnn.planning.training.training import TrainingMachine


def give_room(cycle: Cycle, machine: TrainingMachine, placement: Placement, budget_bytes: int) -> list[int]:
    """Sets the releases and issues of all moves, and returns the bytes on the device at each task."""
    count, held = len(cycle.tasks), list(cycle.needed_bytes)
    for move, tasks in zip(cycle.outs, _tasks_in_room_shares(cycle, placement, budget_bytes), strict=True):
        _lengthen(move, held, count, budget_bytes, max(tasks, placement.overlap))
    latest = _latest_tasks(cycle, machine)
    for move in cycle.ins:
        issue = move.task
        first = max(latest.pop(0), move.earliest, move.task - count + 1)
        while issue > first and (not move.takes_room or held[(issue - 1) % count] + move.nbytes <= budget_bytes):
            issue -= 1
            if move.takes_room:
                held[issue % count] += move.nbytes
        move.bound = issue
    for move in cycle.outs:
        _lengthen(move, held, count, budget_bytes, count)
    cycle.ins.sort(key=lambda move: (move.bound, move.task))
    return held


def _lengthen(move: Move, held: list[int], count: int, budget_bytes: int, tasks: int) -> None:
    for _ in range(tasks):
        if move.bound - move.task >= count or held[move.bound % count] + move.nbytes > budget_bytes:
            break
        held[move.bound % count] += move.nbytes
        move.bound += 1


def _tasks_in_room_shares(cycle: Cycle, placement: Placement, budget_bytes: int) -> list[int]:
    """For each copy to the host, the tasks that its share of the room allows."""
    count, needed = len(cycle.tasks), cycle.needed_bytes
    if not placement.room_share_of_steps and not placement.room_share_of_passes:
        return [0] * len(cycle.outs)
    left = [0] * count  # bytes that leave after each task
    for move in cycle.outs:
        left[move.task] += move.nbytes
    share = _places_in_phases(cycle)
    found = []
    for move in cycle.outs:
        is_step = cycle.tasks[move.task].kind is TaskKind.STEP
        room_share = placement.room_share_of_steps if is_step else placement.room_share_of_passes
        room = room_share * share[move.task] * (budget_bytes - needed[move.task])
        tasks, waiting = 0, float(left[move.task])
        while waiting <= room and tasks < count - 1:
            tasks += 1
            waiting += left[(move.task + tasks) % count]
        found.append(tasks)
    return found


def _places_in_phases(cycle: Cycle) -> list[float]:
    """From near 0 for the first task of forward, backward, or the step after backward, to 1 for the last."""
    kinds, phases = [task.kind for task in cycle.tasks], [0]
    is_alone = kinds[-1] is TaskKind.STEP and TaskKind.FORWARD not in kinds[kinds.index(TaskKind.STEP) :]
    is_alone = is_alone and TaskKind.BACKWARD not in kinds[kinds.index(TaskKind.STEP) :]
    for before, kind in itertools.pairwise(kinds):
        turns = {before, kind} == {TaskKind.FORWARD, TaskKind.BACKWARD}
        turns |= before is TaskKind.BACKWARD and kind is TaskKind.STEP and is_alone
        phases.append(phases[-1] + turns)
    sizes, seen, places = Counter(phases), Counter[int](), []
    for phase in phases:
        seen[phase] += 1
        places.append(seen[phase] / sizes[phase])
    return places


def _latest_tasks(cycle: Cycle, machine: TrainingMachine) -> list[int]:
    """For each copy to the device, the last task at which it can begin so that no task waits, if tasks never wait."""
    begins, now = [], 0
    for task in cycle.tasks:
        begins.append(now)
        now += task.duration_ns
    rate, back = machine.link.to_device_bytes_per_s / 1e9, machine.link.to_host_bytes_per_s / 1e9
    duplex = machine.link.duplex_bytes_per_s / 1e9
    if back + rate > duplex and cycle.outs:
        rate = duplex / 2
    rate = min(rate, machine.host_bytes_per_s / 1e9 / 2)
    busy = [move.nbytes / rate + machine.link.latency_ns for move in cycle.ins]
    whole = 0.0  # added in the order of the native form: sum() rounds otherwise from Python 3.12 on
    for one in busy:
        whole += one
    period = max(float(now), whole, 1.0)
    following, found = float("inf"), [0] * len(cycle.ins)
    for _ in range(2):  # the second time with what the next cycle needs first
        for index in reversed(range(len(cycle.ins))):
            following = min(following, float(begins[cycle.ins[index].task])) - busy[index]
            turns, rest = divmod(following, period)
            found[index] = bisect_right(begins, min(rest, float(now))) - 1 + int(turns) * len(begins)
        following += period
    return found
