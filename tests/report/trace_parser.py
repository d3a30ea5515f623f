"""Reads a trace as a viewer does and reports its faults. For tests of the code that writes traces."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Row:
    """One row of one process."""

    name: str | None = None
    slices: list[tuple[int, int, str, dict[str, Any]]] = field(default_factory=list)  # begin, end, name, about

    def total_ns(self, *names: str) -> int:
        """The total time of all slices, or of those with these names."""
        return sum(end - begin for begin, end, name, _ in self.slices if not names or name in names)


@dataclass(slots=True)
class Process:
    name: str | None = None
    rows: defaultdict[int, Row] = field(default_factory=lambda: defaultdict(Row))
    counted: list[tuple[int, int]] = field(default_factory=list)

    def row(self, name: str) -> Row:
        (found,) = (row for row in self.rows.values() if row.name == name)
        return found


class TraceError(Exception):
    """The trace breaks a rule of its format."""


def parse(text: str) -> dict[int, Process]:
    """Returns the rows by process. Raises TraceError for the first fault."""
    trace = json.loads(text)
    processes: defaultdict[int, Process] = defaultdict(Process)
    for event in trace["traceEvents"]:
        for name, kinds in (("ph", str), ("ts", (int, float)), ("pid", int), ("tid", int), ("name", str)):
            if not isinstance(event.get(name), kinds):
                raise TraceError(f"an event has no {name}: {event}")
        _take(processes[event["pid"]], event)
    for process in processes.values():
        _judge(process)
    return dict(processes)


def _take(process: Process, event: dict[str, Any]) -> None:
    begin = _ns(event["ts"])
    if event["ph"] == "M":
        if event["name"] == "process_name":
            process.name = event["args"]["name"]
        else:
            process.rows[event["tid"]].name = event["args"]["name"]
    elif event["ph"] == "X":
        if not isinstance(event.get("dur"), (int, float)) or event["dur"] < 0 or event["ts"] < 0:
            raise TraceError(f"a slice goes back in time: {event}")
        end = begin + _ns(event["dur"])
        process.rows[event["tid"]].slices.append((begin, end, event["name"], event["args"]))
    elif event["ph"] == "C":
        (count,) = event["args"].values()
        process.counted.append((begin, count))
    else:
        raise TraceError(f"a kind of event that is not known: {event['ph']}")


def _judge(process: Process) -> None:
    if process.name is None:
        raise TraceError("a process has no name")
    for number, row in process.rows.items():
        if row.name is None:
            raise TraceError(f"row {number} of {process.name} has no name")
        for before, after in itertools.pairwise(sorted(row.slices, key=lambda one: one[:2])):
            if after[0] < before[1]:
                raise TraceError(f"slices of {row.name} overlap: {before} and {after}")
    if process.counted != sorted(process.counted, key=lambda one: one[0]):
        raise TraceError(f"the counter of {process.name} goes back in time")


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)
