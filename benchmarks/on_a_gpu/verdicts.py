"""Verdicts of gpu-proof as text: a line for each step, what its program found, and the end of its log if it failed.

The text stays below a number of characters, because the end of a program's output is often all that is kept of it. The
lines of the steps always have room, then what was found, and the rest goes to the logs of what failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_LETTERS = 11_000
_SAID_LETTERS = 300


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step went. `facts` is for programs, `found` are lines for people, `log` is the end of what it wrote.
    `passed` is None if it did not run."""

    step: str
    passed: bool | None
    took_s: float
    limit_s: float
    said: str = ""
    found: tuple[str, ...] = ()
    log: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def render_verdicts(title: str, outcomes: Sequence[Outcome], *, most: int = MOST_LETTERS) -> str:
    heads = [_head(outcome) for outcome in outcomes]
    passed, failed = (sum(outcome.passed is value for outcome in outcomes) for value in (True, False))
    not_run = len(outcomes) - passed - failed
    last = f"{title}: {passed} passed, {failed} failed" + (f", {not_run} not run" if not_run else "")
    room = max(0, most - sum(len(head) + 1 for head in heads) - len(title) - len(last) - 4)
    found = _shared(["\n".join(f"      {line}" for line in outcome.found) for outcome in outcomes], room * 2 // 3)
    logs = ["" if outcome.passed is not False else outcome.log for outcome in outcomes]
    # Each log has a frame of its own.
    frames = sum(_FRAME for log in logs if log)
    logs = _shared(logs, room - sum(len(text) + 1 for text in found if text) - frames, from_end=True)
    lines = ["", title]
    for head, text, log in zip(heads, found, logs, strict=True):
        lines.append(head)
        lines += [text] if text else []
        lines += ["      --- the end of its log ---", log, "      ---"] if log else []
    return "\n".join([*lines, last])[-most:]


_FRAME = 48


def _head(outcome: Outcome) -> str:
    verdict = {True: "passed", False: "FAILED", None: "not run"}[outcome.passed]
    said = outcome.said if len(outcome.said) <= _SAID_LETTERS else f"{outcome.said[: _SAID_LETTERS - 3]}..."
    said = " ".join(said.split())
    return f"  {outcome.step:22} {verdict:7} {outcome.took_s:6.1f} of {outcome.limit_s:3.0f} s  {said}".rstrip()


def _shared(texts: Sequence[str], room: int, *, from_end: bool = False) -> list[str]:
    """Cut texts to have room together. Short ones are whole, and long ones share what these leave."""
    cut = list(texts)
    left, waiting = (
        room,
        sorted((index for index, text in enumerate(texts) if text), key=lambda index: len(texts[index])),
    )
    for place, index in enumerate(waiting):
        share = max(left // (len(waiting) - place) - 1, 0)
        text = texts[index]
        if len(text) > share:
            mark = "[...]"
            kept = max(share - len(mark), 0)
            text = "" if not kept else mark + text[-kept:] if from_end else text[:kept] + mark
        cut[index] = text
        left -= len(text) + 1
    return cut
