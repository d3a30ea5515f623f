"""The link of this machine, as measured: values that the doctor shows and a planner reckons with.

Only numbers; how they are measured is in vdnn/hardware/link_probe.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """The link between one device and its host, for copies of whole blocks of `block_bytes` in pinned memory.

    Rates are bytes per second, medians of `repeats` runs. `both_ways_bytes_per_s` is the sum of the two
    directions while both are busy. `pinning_ns` is what page-locking one block takes.
    """

    block_bytes: int
    repeats: int
    to_host_bytes_per_s: int
    to_device_bytes_per_s: int
    both_ways_bytes_per_s: int
    pinning_ns: int
