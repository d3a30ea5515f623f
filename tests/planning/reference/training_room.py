"""When the moves of a cycle take and give back their memory, so that all tasks stay under the budget.

[Note: Order of choice] A copy to the host first gets `overlap` tasks, and `linger` or `linger_saves` of the room, more
the later its task is in its phase: what has to be moved in a phase then fills the room at first with what came early,
and at last with what is still to leave. Then the copies to the device, in the order of their needs, begin as late as
they can if nothing else holds them up, or later where there is no room. What room is left goes to the copies to the
host.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter

from vdnn.planning.training.cycle import Cycle, Move, TaskKind
from vdnn.planning.training.training import TrainingMachine


def give_room(cycle: Cycle, machine: TrainingMachine, budget_bytes: int) -> list[int]:
    """Sets the releases and issues of all moves, and returns the bytes on the device at each task. See [Note: Order of
    choice]."""
    count, held = len(cycle.tasks), cycle.needed_bytes
    for move, tasks in zip(cycle.outs, _lingering(cycle, budget_bytes), strict=True):
        _lengthen(move, held, count, budget_bytes, max(tasks, cycle.overlap))
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


def _lingering(cycle: Cycle, budget_bytes: int) -> list[int]:
    """For each copy to the host, the tasks that it gets by its place in its phase. See [Note: Order of choice]."""
    count, needed = len(cycle.tasks), cycle.needed_bytes
    if not cycle.linger and not cycle.linger_saves:
        return [0] * len(cycle.outs)
    left = [0] * count  # bytes that leave after each task
    for move in cycle.outs:
        left[move.task] += move.nbytes
    share = _places_in_phases(cycle)
    found = []
    for move in cycle.outs:
        is_step = cycle.tasks[move.task].kind is TaskKind.STEP
        linger = cycle.linger if is_step else cycle.linger_saves
        room = linger * share[move.task] * (budget_bytes - needed[move.task])
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
