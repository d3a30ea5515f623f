"""When the moves of a cycle take and give back their memory, so that all tasks stay under the budget.

[Note: Order of choice] Each copy to the host first gets the tasks of `overlap`, if there is room. Then the copies to
the device, in the order of their needs, begin as late as they can if nothing else holds them up, or later where there
is no room. What room is left goes to the copies to the host.
"""

from __future__ import annotations

from bisect import bisect_right

from vdnn.planning.training.cycle import Cycle, Move
from vdnn.planning.training.training import TrainingMachine

_REST = 3  # tasks that a copy to the host gets in addition, if there is room in the end


def give_room(cycle: Cycle, machine: TrainingMachine, budget_bytes: int) -> list[int]:
    """Sets the releases and issues of all moves, and returns the bytes on the device at each task. See [Note: Order of
    choice]."""
    count, held = len(cycle.tasks), cycle.needed_bytes
    for move in cycle.outs:
        _lengthen(move, held, count, budget_bytes, cycle.overlap)
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
        _lengthen(move, held, count, budget_bytes, _REST)
    cycle.ins.sort(key=lambda move: (move.bound, move.task))
    return held


def _lengthen(move: Move, held: list[int], count: int, budget_bytes: int, tasks: int) -> None:
    for _ in range(tasks):
        if move.bound - move.task >= count or held[move.bound % count] + move.nbytes > budget_bytes:
            break
        held[move.bound % count] += move.nbytes
        move.bound += 1


def _latest_tasks(cycle: Cycle, machine: TrainingMachine) -> list[int]:
    """For each copy to the device, the last task at which it can begin so that no task waits, if tasks never wait."""
    begins, now = [], 0
    for task in cycle.tasks:
        begins.append(now)
        now += task.duration_ns
    rate = machine.link.to_device_bytes_per_s
    if machine.link.to_host_bytes_per_s + rate > machine.link.duplex_bytes_per_s and cycle.outs:
        rate = machine.link.duplex_bytes_per_s / 2
    rate = min(rate, machine.host_bytes_per_s / 2)
    busy = [move.nbytes / rate * 1e9 + machine.link.latency_ns for move in cycle.ins]
    period = max(float(now), sum(busy), 1.0)
    following, found = float("inf"), [0] * len(cycle.ins)
    for _ in range(2):  # the second time with what the next cycle needs first
        for index in reversed(range(len(cycle.ins))):
            following = min(following, float(begins[cycle.ins[index].task])) - busy[index]
            turns, rest = divmod(following, period)
            found[index] = bisect_right(begins, min(rest, float(now))) - 1 + int(turns) * len(begins)
        following += period
    return found
