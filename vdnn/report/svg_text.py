"""Converts matplotlib's SVG for a page: an element without a size, with named colours and short paths.

Staircases of a thousand steps take most of a figure's bytes. Written as relative steps of a tenth of a point, they take
a tenth of the bytes and look the same.
"""

from __future__ import annotations

import re

from vdnn.report.palette import themed

_PATH = re.compile(r' d="([^"]*)"')
_SIMPLE = re.compile(r"[MLz\d\s.\-]*")
_SEGMENT = re.compile(r"([MLz])\s*(?:(-?[\d.]+)\s+(-?[\d.]+))?")


def inlined(svg: str) -> str:
    """The SVG element without the parts that a browser does not need in a page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # every figure numbers its groups from 1, so ids would repeat
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    head, opened, rest = svg.partition(">")
    head = re.sub(r' (width|height|version)="[^"]*"', "", head)
    return themed(_PATH.sub(lambda found: f' d="{short_path(found[1])}"', head + opened + rest))


def short_path(path: str) -> str:
    """The same lines in tenths of a point, each relative to the end of the previous one. Curves are unchanged."""
    if not _SIMPLE.fullmatch(path):
        return " ".join(path.split())
    found: list[str] = []
    at = (0, 0)  # tenths
    run: list[tuple[int, int]] = []
    for command, x, y in _SEGMENT.findall(path):
        if command == "L":
            run.append((round(10 * float(x)), round(10 * float(y))))
            continue
        at = _write_lines(found, at, run)
        run = []
        if command == "z":
            found.append("z")
        else:
            at = round(10 * float(x)), round(10 * float(y))
            found.append(f"M{_tenths(at[0])} {_tenths(at[1])}")
    _write_lines(found, at, run)
    return "".join(found)


def _write_lines(found: list[str], at: tuple[int, int], run: list[tuple[int, int]]) -> tuple[int, int]:
    """Write lines as relative steps. Omits empty steps, and joins steps in the same direction."""
    steps: list[tuple[int, int]] = []
    for corner in run:
        step = corner[0] - at[0], corner[1] - at[1]
        at = corner
        if step == (0, 0):
            continue
        if steps and _has_same_direction(steps[-1], step):
            steps[-1] = steps[-1][0] + step[0], steps[-1][1] + step[1]
        else:
            steps.append(step)
    for across, down in steps:
        if not down:
            found.append(f"h{_tenths(across)}")
        elif not across:
            found.append(f"v{_tenths(down)}")
        else:
            found.append(f"l{_tenths(across)} {_tenths(down)}")
    return at


def _has_same_direction(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return any(not one[side] and not other[side] and one[1 - side] * other[1 - side] > 0 for side in (0, 1))


def _tenths(number: int) -> str:
    return f"{number / 10:g}"
