"""Finds tensors whose memory is a private mapping of a file, such as a checkpoint that was loaded with mmap=True.

Such memory is a host copy already: the pages are the file's, and a copy of them would be a second one.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True, eq=False)
class MappedBlock:
    """Memory of a file in place of a pinned block. Nothing writes to it, so nothing has to wait for its uses."""

    address: int
    bytes: int

    @property
    def last_uses(self) -> tuple[Any, ...]:
        return ()

    def note_use(self, event: object) -> None:
        """Nothing reuses this memory."""


class MappedFiles:
    """The files that are mapped into this process now. Empty where the system does not list them."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for line in _MAPS.read_text().splitlines() if _MAPS.exists() else []:
            span, access, _, _, inode, *path = line.split(maxsplit=5)
            if inode == "0" or not path or not access.endswith("p"):
                continue
            begin, end = (int(edge, 16) for edge in span.split("-"))
            if self._ends and self._ends[-1] == begin:  # one file, written to in parts
                self._ends[-1] = end
                continue
            self._begins.append(begin)
            self._ends.append(end)

    def __contains__(self, tensor: object) -> bool:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
            return False
        address = tensor.data_ptr()
        index = bisect.bisect_right(self._begins, address) - 1
        return index >= 0 and address + tensor.nbytes <= self._ends[index]
