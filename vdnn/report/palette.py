"""Colours and markers of all figures: Okabe and Ito's colours, which most colour-blind people can distinguish.

A figure is drawn in the light colours. In the page, its SVG has a variable for each, and the page's style gives every
variable a light and a dark value. No two entries may therefore have the same light colour.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from vdnn.report.cell import OWN_PEERS, Cell
from vdnn.step.plan import Action


class Shade(NamedTuple):
    """One colour: its name in the page, and its light and dark values."""

    name: str
    light: str
    dark: str


INK = Shade("ink", "#1b1f24", "#e8eaed")
MUTED = Shade("muted", "#57606a", "#a8b1bb")
GRID = Shade("grid", "#d8dee4", "#3a424b")
SURFACE = Shade("surface", "#ffffff", "#1a1f25")
REST = Shade("rest", "#c4cad1", "#4a525c")
REST_SPIKES = Shade("rest-spikes", "#9aa3ad", "#6c7681")
BLUE = Shade("blue", "#0072b2", "#4ba3e3")
ORANGE = Shade("orange", "#e69f00", "#f0b232")
GREEN = Shade("green", "#009e73", "#2fc79b")
VERMILION = Shade("vermilion", "#d55e00", "#ff8a3d")
PURPLE = Shade("purple", "#cc79a7", "#e39cc4")
SKY = Shade("sky", "#56b4e9", "#7cc8f2")

SHADES = (INK, MUTED, GRID, SURFACE, REST, REST_SPIKES, BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)

ACTION_SHADES: dict[Action | None, Shade] = {
    Action.KEEP: SKY,
    Action.OFFLOAD: BLUE,
    Action.RECOMPUTE: GREEN,
    Action.COMPRESS: PURPLE,
    None: SKY,
}
RELEASE_STALL, RELOAD_STALL, HOST_STALL = ORANGE, VERMILION, PURPLE
VDNN_SHADE = GREEN

_PEER_SHADES = (VERMILION, BLUE, ORANGE, PURPLE, SKY, MUTED)
_PEER_MARKERS = ("s", "D", "^", "v", "P", "X", "<", ">", "p", "h", "*", "d")
_HEX = re.compile("#[0-9a-f]{6}")


class Look(NamedTuple):
    """The colour and marker of one peer."""

    shade: Shade
    marker: str


def looks_of(cells: Iterable[Cell]) -> dict[str, Look]:
    """The look of each peer, the same in all figures of a run. It depends on names, not on the order of cells."""
    looks = {"plain": Look(INK, "o")}
    others = sorted({cell.peer for cell in cells} - {"plain"})
    own = [peer for peer in others if peer in OWN_PEERS]
    looks |= {peer: Look(VDNN_SHADE, "o") for peer in own}
    for index, peer in enumerate(peer for peer in others if peer not in own):
        looks[peer] = Look(_PEER_SHADES[index % len(_PEER_SHADES)], _PEER_MARKERS[index % len(_PEER_MARKERS)])
    return looks


def themed(svg: str) -> str:
    """Replace every colour by a variable, whose value the page defines."""
    variables = {shade.light: f"var(--{shade.name})" for shade in SHADES}
    return _HEX.sub(lambda found: variables.get(found[0], found[0]), svg)
