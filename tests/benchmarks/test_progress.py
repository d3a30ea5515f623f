"""The progress line on stderr: silent at first, then one line on a terminal, and removed at the end."""

from __future__ import annotations

import io

from benchmarks.progress import PATIENCE_S, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_nothing_is_said_of_what_is_over_soon() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress("bench", 2, stream=stream, now_s=clock)
    progress.begin("one")
    clock.now_s = PATIENCE_S / 2
    progress.begin("two")
    progress.end()
    assert stream.getvalue() == ""


def test_the_line_on_a_terminal_is_overwritten_and_erased() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress("bench", 3, stream=stream, now_s=clock)
    progress.begin("one")
    clock.now_s = PATIENCE_S
    progress.begin("two")
    progress.begin("three")
    progress.end()
    second = "\r\x1b[Kbench: [######..............] 2 of 3, two ..."
    third = "\r\x1b[Kbench: [#############.......] 3 of 3, three ..."
    assert stream.getvalue() == second + third + "\r\x1b[K"


def test_in_a_file_lines_follow_lines() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress("bench", 1, stream=stream, now_s=clock)
    clock.now_s = PATIENCE_S
    progress.begin("one")
    progress.end()
    assert stream.getvalue() == "bench: 1 of 1, one ...\n"
