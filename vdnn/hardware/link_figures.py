"""LinkFigures: the measured rates of this machine's link, which the doctor shows and planners use.

vdnn/hardware/link_probe.py measures them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """The link between one device and its host, for copies of whole blocks of `block_bytes` in pinned memory.

    Rates are bytes per second, medians of `repeats` runs. `both_ways_bytes_per_s` is the sum of the two directions
    while both are busy. `pinning_ns` is the time to page-lock one block.
    """

    block_bytes: int
    repeats: int
    to_host_bytes_per_s: int
    to_device_bytes_per_s: int
    both_ways_bytes_per_s: int
    pinning_ns: int
