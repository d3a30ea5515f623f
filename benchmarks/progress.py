"""Progress: a line on stderr that says how far a program is, once it has run for more than two seconds.

Tables go to stdout, so that the line does not disturb them in a file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

PATIENCE_S = 2.0
BAR_LETTERS = 20
_ERASE_LINE = "\r\x1b[K"


class Progress:
    """The progress over `total` parts. On a terminal the line has a bar, is overwritten, and is erased at the end;
    elsewhere each part has a line."""

    def __init__(
        self,
        program: str,
        total: int,
        *,
        stream: TextIO | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._program = program
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._now_s = now_s
        self._begin_s = now_s()
        self._done = 0
        self._is_shown = False

    def begin(self, part: str) -> None:
        """Say that the next part begins."""
        self._done += 1
        if self._now_s() - self._begin_s < PATIENCE_S:
            return
        line = f"{self._done} of {self._total}, {part} ..."
        on_terminal = self._stream.isatty()
        self._stream.write(
            f"{_ERASE_LINE}{self._program}: {self._bar()} {line}" if on_terminal else f"{self._program}: {line}\n"
        )
        self._stream.flush()
        self._is_shown = on_terminal

    def _bar(self) -> str:
        """A bar, filled by the share of the parts that have ended."""
        filled = BAR_LETTERS * min(self._done - 1, self._total) // self._total
        return f"[{'#' * filled}{'.' * (BAR_LETTERS - filled)}]"

    def end(self) -> None:
        """Erase the line at the end."""
        if self._is_shown:
            self._stream.write(_ERASE_LINE)
            self._stream.flush()
            self._is_shown = False
