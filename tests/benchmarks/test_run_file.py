"""A file of lines that a killed program may have written: an incomplete last line is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.run_file import append_line, read_lines


def test_lines_come_back_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cells.jsonl"
    assert read_lines(path) == []
    append_line(path, {"a": 1})
    append_line(path, {"a": 2})
    assert read_lines(path) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("rest", ['{"a": 2', '{"a": 2}', '{"a": "\\u00', "\x00\x00"])
def test_a_last_line_without_its_end_is_left_out_and_then_dropped(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text('{"a": 1}\n' + rest)
    assert read_lines(path) == [{"a": 1}]
    append_line(path, {"a": 3})
    assert path.read_text() == '{"a": 1}\n{"a": 3}\n'


def test_a_file_that_is_one_cut_off_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text('{"a"')
    append_line(path, {"a": 3})
    assert read_lines(path) == [{"a": 3}]


def test_a_broken_line_in_the_middle_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text('{"a": 1}\nnonsense\n{"a": 2}\n')
    with pytest.raises(ValueError, match="cells.jsonl, line 2: expected JSON, got 'nonsense'. Remove the line."):
        read_lines(path)
