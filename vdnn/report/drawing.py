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
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vdnn.errors import InvalidArgumentError, LibraryMissingError
from vdnn.report.palette import GRID, INK, MUTED, SURFACE
from vdnn.report.svg_text import inlined

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
