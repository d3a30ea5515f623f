"""Estimates a step that was not recorded yet, from below, so that a budget which it cannot meet is refused ahead of
time.

The estimate rests on two recorded steps. Bytes are sums of products of the sizes that change, so they are convex along
a line of growing sizes: the straight line through two steps stays below the third. If a storage did not grow as a power
of the sizes of the first save, something else changed too, and there is no estimate. Transient bytes (a workspace) may
change for other reasons: where they grew faster, they count as in the larger step.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from vdnn.step.made_steps import first_save, grown, live_bytes
from vdnn.step.recording import Recording, SaveKey

# Storages grow with the square of a size at most (the maps of attention).
_POWERS = (0, 1, 2)
# Sizes are rounded where operations have strides, and memory in blocks of an allocator.
_ROUNDING = 0.02


def lower_estimate(small: Recording, large: Recording, first: SaveKey) -> Recording | None:
    """An estimated recording of a step that begins with `first` and is larger than both recorded ones. None if these
    give no safe estimate. Times are estimated in the same way, and are not a bound."""
    sizes = list(zip(first_save(small).size, first_save(large).size, first.size, strict=False))
    if len(first.size) != len(sizes) or any(not 0 < least <= most <= wanted for least, most, wanted in sizes):
        return None
    growing = [(least, most, wanted) for least, most, wanted in sizes if least < most]
    ratios = [most / least for least, most, _ in growing]
    if not growing or len(small.points) != len(large.points) or not _grew_alike(small, large, ratios):
        return None
    growth = min((wanted - most) / (most - least) for least, most, wanted in growing)
    return grown(_without_jumps(small, large, math.prod(ratios) ** max(_POWERS)), large, first, growth)


def _grew_alike(small: Recording, large: Recording, ratios: list[float]) -> bool:
    """True if every storage grew as a product of powers of these ratios."""
    known = [
        math.prod(ratio**power for ratio, power in zip(ratios, powers, strict=True))
        for powers in itertools.product(_POWERS, repeat=len(ratios))
    ]
    return len(small.lifetimes) == len(large.lifetimes) and all(
        any(abs(longer.nbytes - ratio * shorter.nbytes) <= _ROUNDING * longer.nbytes for ratio in known)
        for shorter, longer in zip(small.lifetimes, large.lifetimes, strict=True)
    )


def _without_jumps(small: Recording, large: Recording, most: float) -> Recording:
    """The smaller step. At points where the larger one has more than `most` times as many transient bytes it has those,
    so that they do not grow along the line."""
    live, live_in_large = (live_bytes(one.lifetimes, len(one.points)) for one in (small, large))
    points = []
    for index, (point, other) in enumerate(zip(small.points, large.points, strict=True)):
        transient_bytes = point.peak_bytes - live[index] - small.resident_bytes
        later_bytes = other.peak_bytes - live_in_large[index] - large.resident_bytes
        jumps = later_bytes > (1 + _ROUNDING) * most * max(0, transient_bytes)
        peak_bytes = live[index] + small.resident_bytes + later_bytes if jumps else point.peak_bytes
        points.append(replace(point, peak_bytes=peak_bytes))
    return replace(small, points=tuple(points))
