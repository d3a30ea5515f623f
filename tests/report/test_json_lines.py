"""A file of lines that a killed program may have written: an incomplete last line is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from vdnn.errors import FormatError
from vdnn.step.json_lines import append_json_lines, read_json_lines


def test_lines_come_back_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cells.jsonl"
    assert read_json_lines(path).values == []
    append_json_lines(path, [{"a": 1}])
    append_json_lines(path, [{"a": 2}, {"a": 3}])
    assert read_json_lines(path).values == [{"a": 1}, {"a": 2}, {"a": 3}]


@pytest.mark.parametrize("rest", ['{"a": 2', '{"a": "\\u00', "\x00\x00"])
def test_a_last_line_that_was_cut_off_is_left_out_and_then_dropped(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text('{"a": 1}\n' + rest)
    assert read_json_lines(path) == ([(1, {"a": 1})], 2)
    append_json_lines(path, [{"a": 3}])
    assert path.read_text() == '{"a": 1}\n{"a": 3}\n'


def test_a_whole_last_line_without_its_end_counts(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}')
    assert read_json_lines(path) == ([(1, {"a": 1}), (3, {"a": 2})], None)
    append_json_lines(path, [{"a": 3}])
    assert path.read_text() == '{"a": 1}\n\n{"a": 2}\n{"a": 3}\n'


def test_a_file_that_is_one_cut_off_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text('{"a"')
    append_json_lines(path, [{"a": 3}])
    assert read_json_lines(path).values == [{"a": 3}]


def test_a_broken_line_in_the_middle_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text('{"a": 1}\nnonsense\n{"a": 2}\n')
    with pytest.raises(FormatError, match="cells.jsonl, line 2: expected JSON, got 'nonsense': .* Remove the line."):
        read_json_lines(path)
