"""Plain-text tables: a title, columns as wide as their longest cell, and remarks below."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 96


def render_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], remarks: Sequence[str] = ()) -> str:
    """Render a table. The first column is aligned left, the others, which are numbers, right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    body = [_row(line, widths) for line in lines]
    rule = "-" * max(map(len, body))
    below = [part for remark in remarks for part in textwrap.wrap(remark, WIDTH)]
    return "\n".join([title, rule, body[0], rule, *body[1:], rule, *below])


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(width) if column == 0 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()
