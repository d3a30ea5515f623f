"""Draws pictures with matplotlib, which is imported only here and only when something is drawn.

A picture has a name, a sentence that describes it for screen readers, and a function that draws it in a given shape:
wide for a desktop, narrow for a phone. Text stays text in the SVG, names are never parsed as formulas, and the same
picture gives the same file.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vdnn.errors import InvalidArgumentError, LibraryMissingError
from vdnn.report.palette import GRID, INK, MUTED, SURFACE, themed

FONT_POINTS = 10.7  # a little more than 14 px if the picture is shown at its own size
_PNG_DOTS_PER_INCH = 160
_TITLE_INCHES = 0.25
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True, slots=True)
class Shape:
    """The width of a picture, in inches of 96 px. A picture below a heading of a page has no title of its own."""

    name: str
    width: float
    has_title: bool = True

    @property
    def is_narrow(self) -> bool:
        return self.width < 5


WIDE, NARROW = Shape("wide", 10.0), Shape("narrow", 3.5)
_TITLE_LETTERS = {"wide": 100, "narrow": 31}


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of `workload`. `draw` fills a figure of a shape; `height` gives its height in inches."""

    name: str
    title: str
    described: str
    workload: str
    draw: Callable[[Any, Shape], None]
    height: Callable[[Shape], float]

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Save a PNG and an SVG, both wide, in `folder`, which is created if missing."""
        folder_path = Path(folder)
        folder_path.mkdir(parents=True, exist_ok=True)
        paths = [folder_path / f"{self.name}.png", folder_path / f"{self.name}.svg"]
        for path in paths:
            save_figure(self.draw, WIDE, self.height(WIDE), path)
        return paths

    def inline(self, shape: Shape) -> str:
        """The picture as an SVG element for a page that defines the colours and has a heading. It has no title, and no
        id that another picture has."""
        bare = replace(shape, has_title=False)
        return inlined(rendered(self.draw, bare, self.height(shape) - _TITLE_INCHES, "svg", self.name).decode("utf-8"))


def save_figure(draw: Callable[[Any, Shape], None], shape: Shape, height: float, path: Path) -> None:
    """Draw and save a figure, as PNG or SVG by the ending of the path."""
    path.write_bytes(rendered(draw, shape, height, path.suffix.removeprefix(".").lower(), path.stem))


def rendered(draw: Callable[[Any, Shape], None], shape: Shape, height: float, form: str, salt: str) -> bytes:
    if form not in ("png", "svg"):
        raise InvalidArgumentError(argument="figure", expected="a path that ends in .png or .svg", got=repr(form))
    with _settings(f"{salt} {shape.name}"):
        figure = _module("matplotlib.figure").Figure(figsize=(shape.width, height), layout="constrained")
        canvas = _module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
        draw(figure, shape)
        held = io.BytesIO()
        if form == "png":
            figure.savefig(held, format="png", dpi=_PNG_DOTS_PER_INCH, metadata={"Software": None})
        else:
            metadata = {"Date": None, "Creator": None, "Type": None, "Format": None}
            canvas.print_figure(held, format="svg", metadata=metadata)
    return held.getvalue()


def set_title(figure: Any, shape: Shape, text: str) -> None:
    """Set a left-aligned title, if the shape has one."""
    if shape.has_title:
        lines = "\n".join(textwrap.wrap(text, _TITLE_LETTERS[shape.name]))
        figure.suptitle(lines, x=0.01, ha="left", fontsize=FONT_POINTS + 1.4, fontweight="bold")


def time_label(shape: Shape, clock: str) -> str:
    """The label of an axis of time over one step."""
    unit = "ms, virtual" if clock == "virtual" else "ms"
    return f"time ({unit})" if shape.is_narrow else f"time since the step began ({unit})"


def quiet_axes(axes: Any) -> None:
    """Remove two spines and draw a faint grid, so that the data stands out."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(color=GRID.light, linewidth=0.8)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise LibraryMissingError(what="drawing figures", library="matplotlib", extra="report") from None


def plain_number(number: float) -> str:
    """The number with three digits or all of its integer part, never with an exponent: "5,490", "4.07", "0.0012"."""
    if abs(number) >= 100 or not number:
        return f"{number:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(number))))
    text = f"{number:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def unit_for(nbytes: int) -> tuple[str, int]:
    """The unit in which an axis of memory up to `nbytes` reads best, and its bytes: the largest that does not exceed
    it, or else the smallest."""
    return next(((name, size) for name, size in _UNITS if nbytes >= size), _UNITS[-1])


def require_matplotlib() -> None:
    _module("matplotlib.figure")


@contextlib.contextmanager
def _settings(salt: str) -> Iterator[None]:
    matplotlib = _module("matplotlib")
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A name may have a letter that the font lacks. matplotlib draws a box for it, and that is not an error here.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        matplotlib.rcdefaults()  # the user's own settings do not apply
        matplotlib.rcParams.update(
            {
                "font.family": "sans-serif",
                "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
                "font.size": FONT_POINTS,
                "axes.titlesize": FONT_POINTS,
                "legend.fontsize": FONT_POINTS,
                "legend.frameon": False,
                "text.parse_math": False,
                "text.color": INK.light,
                "axes.labelcolor": INK.light,
                "axes.edgecolor": MUTED.light,
                "xtick.color": MUTED.light,
                "ytick.color": MUTED.light,
                "xtick.labelcolor": INK.light,
                "ytick.labelcolor": INK.light,
                "figure.facecolor": SURFACE.light,
                "axes.facecolor": "none",
                "axes.formatter.useoffset": False,
                "axes.formatter.limits": (-9, 12),  # never 1e6 beside an axis
                "hatch.linewidth": 1.2,
                "svg.fonttype": "none",
                "svg.hashsalt": salt,
                "path.simplify": True,
            }
        )
        yield


# Converts matplotlib's SVG for a page: an element without a size, with named colours and short paths.
#
# Staircases of a thousand steps take most of a figure's bytes. Written as relative steps of a tenth of a point, they
# take a tenth of the bytes and look the same.

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
