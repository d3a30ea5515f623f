"""Judges of gpu-proof: each reads what a step's program wrote, and says what was found and what is wrong with it.

They read logs and files and need the standard library alone, so that they work where nothing could be built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB, GIB = 2**20, 2**30
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Judged:
    """`problems` make the step a failure, whatever its exit code is. `found` are lines for people."""

    problems: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


# Gets the step's log and the part's work folder.
Judge = Callable[[Path, Path], Judged]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines. A line that was cut off is left out, and a missing file has none."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def judge_machine(log: Path, work: Path) -> Judged:
    found = rows_of(work / "machine.json")
    report: dict[str, Any] = found[0] if found else {"gpus": 0}
    lines: list[str] = report.get("lines", [])
    return Judged(tuple(line for line in lines if line.startswith("no GPU")), tuple(lines), report)


def judge_by_last_line(log: Path, work: Path) -> Judged:
    lines = log.read_text(errors="replace").strip().splitlines()
    return Judged(found=tuple(lines[-1:]))


def judge_by_output(log: Path, work: Path) -> Judged:
    """The whole output is the finding: the program prints a table."""
    return Judged(found=tuple(log.read_text(errors="replace").strip().splitlines()))


# Tests.

# A line that `pytest -v` prints of a test, such as "tests/x.py::test_a[b c] PASSED".
_TEST = re.compile(r"^(tests/\S+?::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b(.*)$")
# A line of pytest's summary, such as "SKIPPED [1] tests/x.py:25: the reason".
_SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] (tests/\S+?)(?::\d+)?: (.*)$")
_BEGUN = re.compile(r"^(tests/\S+?::\S+.*?) *$")


def judge_tests(log: Path, work: Path) -> Judged:
    """Counts by the lines of `pytest -v`, which are there up to the test that hung. A skipped test is said with its
    reason and is no failure; tests that were all skipped prove nothing."""
    text = log.read_text(errors="replace")
    verdicts: dict[str, str] = {}
    skipped: dict[str, int] = {}
    for line in text.splitlines():
        if match := _TEST.match(line):
            verdicts[match[1]] = match[2]
        elif match := _SKIPPED.match(line):
            skipped[match[3]] = skipped.get(match[3], 0) + int(match[1])
    counts = {name: list(verdicts.values()).count(name.upper()) for name in ("passed", "failed", "error", "skipped")}
    failed = [name for name, verdict in verdicts.items() if verdict in ("FAILED", "ERROR")]
    problems = [f"{len(failed)} tests failed"] if failed else []
    if not counts["passed"]:
        problems.append("no test passed")
    found = [", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no test ended"]
    found += [f"skipped, {count}: {reason}" for reason, count in skipped.items()]
    found += [f"failed: {name}" for name in failed[:_MOST_NAMED]]
    found += [f"and {len(failed) - _MOST_NAMED} more"] if len(failed) > _MOST_NAMED else []
    running = _running(text, verdicts)
    found += [f"did not end: {running}"] if running else []
    return Judged(tuple(problems), tuple(found), counts)


def _running(text: str, verdicts: dict[str, str]) -> str:
    """The test that had begun when the output ended, or an empty text. Reports of a hang may follow its name."""
    text = re.sub(r" *(Fatal Python error|Timeout \(\d)", r"\n\1", text)
    begun = [match[1] for match in map(_BEGUN.match, text.splitlines()) if match]
    return next((name for name in reversed(begun) if not _TEST.match(name) and name not in verdicts), "")


# Link, calls, hooks, doctor.


def judge_doctor(log: Path, work: Path) -> Judged:
    """Every GPU must have a measured link, and every kernel its device code."""
    text = log.read_text(errors="replace")
    try:
        report = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except ValueError as error:
        return Judged((f"the doctor wrote no report ({error})",))
    gpus = report["gpus"]
    problems = [f"GPU {gpu['ordinal']}: {gpu['problem']}" for gpu in gpus if gpu["link"] is None]
    problems += [f"kernel {codec['kernel']}: {codec['reason']}" for codec in report["codecs"] if not codec["available"]]
    if not gpus:
        problems.append(f"the doctor sees no GPU: {report['driver']['problem']}")
    found = [_link_line(gpu) for gpu in gpus if gpu["link"] is not None]
    return Judged(tuple(problems), (*found, *report.get("meanings", ())), report)


def _link_line(gpu: dict[str, Any]) -> str:
    ways = {"to host": "to_host", "to device": "to_device", "both": "both_ways"}
    rates = (f"{name} {gpu['link'][f'{key}_bytes_per_s'] / 1e9:.1f}" for name, key in ways.items())
    return f"{gpu['name']}: GB/s {', '.join(rates)}"


def judge_table(name: str) -> Judge:
    """The rows of a file, and the table that the log ends with."""

    def judge(log: Path, work: Path) -> Judged:
        rows = rows_of(work / name)
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        rules = [index for index, line in enumerate(lines) if set(line) == {"-"}]
        # A title, a rule, the header and so on: what is above is not the table's.
        table = [line for line in lines[rules[0] - 1 :] if set(line) != {"-"}] if rules else []
        return Judged(() if rows else (f"no rows in {name}",), tuple(table), {"rows": rows})

    return judge


def judge_hooks(log: Path, work: Path) -> Judged:
    path = work / "hook_cost.json"
    if not path.is_file():
        return Judged(("the program wrote no figures",))
    facts = json.loads(path.read_text())
    rows = facts.get("rows", [])
    found = [f"{row['way']}: {row['cost_ns'] / 1e3:.2f} us, {row['no_ops'] or 0:.1f} x no-op hooks" for row in rows]
    found += [f"{name}: {facts[name]}" for name in ("kept_settled", "offloaded_settled") if name in facts]
    return Judged((), tuple(found), facts)


# Trainings.


def judge_sweep(run: str, workloads: Sequence[str] = ()) -> Judge:
    """The cells of a run, of these workloads if they are named: a line for each. What is vdnn's must not fail, and must
    have plain's gradients; other peers may fail."""

    def judge(log: Path, work: Path) -> Judged:
        cells = [
            cell
            for cell in latest(rows_of(work / run / "cells.jsonl"))
            if not workloads or cell["workload"] in workloads
        ]
        problems = [f"{_title(cell)}: {wrong}" for cell in cells if (wrong := _wrong(cell))]
        if not any(cell["status"] == "ok" and cell["peer"].startswith("vdnn") for cell in cells):
            problems.append("no cell of vdnn ran")
        if not cells:
            problems.append("the sweep wrote no cells")
        counts = {"cells": len(cells), "ok": sum(cell["status"] == "ok" for cell in cells)}
        is_short = "the time limit is reached" in log.read_text(errors="replace")
        over = ("the time was over before all cells had run",) if is_short else ()
        return Judged(tuple(problems), (*_cell_lines(cells), *over), counts)

    return judge


def latest(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The later one of each two cells of one kind."""
    key = ("workload", "batch", "peer", "compiled", "budget")
    return list({tuple(cell.get(name) for name in key): cell for cell in cells}.values())


def _title(cell: dict[str, Any]) -> str:
    compiled = "compiled " if cell.get("compiled") else ""
    return f"{cell['workload']} {compiled}{cell['peer']}{' ' + cell['budget'] if cell.get('budget') else ''}"


def _wrong(cell: dict[str, Any]) -> str:
    if cell["peer"] == "plain" and cell["status"] in ("failed", "timed-out"):
        return f"{cell['status']}: {cell.get('said', '')[:200]}"
    if not cell["peer"].startswith("vdnn"):
        return ""
    if cell["status"] in ("failed", "timed-out", "out-of-memory") and "cannot be met" not in cell.get("said", ""):
        return f"{cell['status']}: {cell.get('said', '')[:200]}"
    return "gradients differ from plain's" if cell.get("identical") is False else ""


def _cell_lines(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    plains = {(cell["workload"], bool(cell.get("compiled"))): cell for cell in cells if cell["peer"] == "plain"}
    for cell in cells:
        if cell["status"] != "ok":
            yield f"{_title(cell)}: {cell['status']}: {cell.get('said', '')[:120]}"
            continue
        plain = plains.get((cell["workload"], bool(cell.get("compiled"))), cell)
        yield f"{_title(cell)}: {', '.join(_figures(cell, plain))}"


def _figures(cell: dict[str, Any], plain: dict[str, Any]) -> Iterator[str]:
    step_ns, peak = cell["step_ns"], cell.get("requested_bytes") or cell["peak_bytes"]
    yield f"{step_ns / 1e6:.2f} ms"
    if plain is not cell and plain.get("step_ns"):
        plain_peak = plain.get("requested_bytes") or plain["peak_bytes"]
        yield f"{step_ns / plain['step_ns']:.3f} x"
        yield f"{_bytes(peak)}, {peak / plain_peak:.1%}"
    else:
        yield _bytes(peak)
    if cell.get("budget_bytes"):
        yield f"budget {_bytes(cell['budget_bytes'])}"
    if cell.get("predicted_step_ns"):
        yield f"predicted {cell['predicted_step_ns'] / 1e6:.2f} ms {_bytes(cell['predicted_peak_bytes'])}"
    if cell.get("to_host_bytes"):
        yield f"out {_bytes(cell['to_host_bytes'])}"
    if cell.get("stall_ns"):
        yield f"stalls {cell['stall_ns'] / 1e6:.1f} ms"
    if cell["peer"] != "plain":
        yield {True: "bits as plain", False: "bits DIFFER", None: "bits not comparable"}[cell.get("identical")]
    elif cell.get("deterministic") is False:
        yield "does not repeat its own bits"


def _bytes(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / MIB:.2f} MiB"


def judge_claims(log: Path, work: Path) -> Judged:
    """Broken promises are failures; aims that were missed are said."""
    lines = tuple(line for line in log.read_text(errors="replace").splitlines() if line.strip())
    broken = tuple(line for line in lines if line.startswith("BROKEN"))
    return Judged(broken or (() if lines else ("no claims were printed",)), lines, {"claims": list(lines)})
