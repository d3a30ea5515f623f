"""The plans of the chain of small operations that the cost of hooks is measured on: all kept, or all offloaded.

The chain is a step of its own. Its saves and uses are known, so its plan needs no recording.
"""

from __future__ import annotations

from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime, PlannedPoint
from vdnn.step.recording import PointKind, SaveKey

# So many saves after its own a storage is released, and so many uses before its own it is reloaded.
_AWAY = 32


def chain_plan(saves: int, elements: int, *, offloads: bool) -> Plan:
    """The plan of a chain of `sin` with so many saves that may move: the input of the first one is a leaf."""
    keys = [SaveKey("SinBackward0", "", "float32", (elements,), (1,), number) for number in range(saves)]
    points = [PlannedPoint(PointKind.SAVE, number, key) for number, key in enumerate(keys)]
    points += [PlannedPoint(PointKind.USE, number, None) for number in reversed(range(saves))]
    points.append(PlannedPoint(PointKind.END, None, None))
    lifetimes = tuple(_lifetime(number, saves, 4 * elements, offloads=offloads) for number in range(saves))
    return Plan("all offloaded" if offloads else "all kept", "cpu", "sim", None, tuple(points), lifetimes)


def _lifetime(number: int, saves: int, nbytes: int, *, offloads: bool) -> PlannedLifetime:
    use = 2 * saves - 1 - number
    release, reload = number + _AWAY, use - _AWAY
    if not offloads or release >= reload:
        return PlannedLifetime(nbytes, Action.KEEP)
    return PlannedLifetime(nbytes, Action.OFFLOAD, (Absence(release, reload),))
