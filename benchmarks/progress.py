"""A line on stderr that says how far a program is, once it has taken longer than a couple of seconds.

Tables go to stdout: what is written here is in nobody's way when they are kept in a file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

PATIENCE_S = 2.0
_ERASE_LINE = "\r\x1b[K"


class Progress:
    """Of `total` parts. On a terminal the line is overwritten and in the end erased; elsewhere lines follow lines."""

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
        """The next part begins."""
        self._done += 1
        if self._now_s() - self._begin_s < PATIENCE_S:
            return
        line = f"{self._program}: {self._done} of {self._total}, {part} ..."
        on_terminal = self._stream.isatty()
        self._stream.write(_ERASE_LINE + line if on_terminal else line + "\n")
        self._stream.flush()
        self._is_shown = on_terminal

    def end(self) -> None:
        """All is done."""
        if self._is_shown:
            self._stream.write(_ERASE_LINE)
            self._stream.flush()
            self._is_shown = False
