"""HostReads: the values and sizes that the host got in a real step, by line and in order, for a rehearsal to use again.

A value is the number that was read; a size is how many elements a mask chose. If a rehearsal has a larger batch, sizes
grow with it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

_Question = tuple[str, str]


class HostReads:
    """The answers of the last real step. Each rehearsed step reads them from the beginning."""

    def __init__(self) -> None:
        self._answers: dict[_Question, list[Any]] = {}
        self._read: Counter[_Question] = Counter()

    def begin_step(self, *, is_real: bool) -> None:
        self._read.clear()
        if is_real:
            self._answers.clear()

    def note(self, what: str, place: str, answer: Any) -> None:
        self._answers.setdefault((what, place), []).append(answer)

    def replay(self, what: str, place: str) -> Any | None:
        """The next answer for this line, or None if the real step did not read there. After the last answer the first
        one comes again."""
        known = self._answers.get((what, place))
        if known is None:
            return None
        turn = self._read[what, place]
        self._read[what, place] += 1
        return known[turn % len(known)]
