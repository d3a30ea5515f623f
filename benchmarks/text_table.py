"""Plain-text tables: a title, columns as wide as their longest cell, and remarks below."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from vdnn.report.plan_text import aligned

WIDTH = 96


def render_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], remarks: Sequence[str] = ()) -> str:
    """Render a table. The first column is aligned left, the others, which are numbers, right."""
    lines = [header, *rows]
    body = aligned(lines, left=(0,)).split("\n")
    rule = "-" * max(map(len, body))
    below = [part for remark in remarks for part in textwrap.wrap(remark, WIDTH)]
    return "\n".join([title, rule, body[0], rule, *body[1:], rule, *below])
