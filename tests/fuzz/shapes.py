"""Values may have any shape whose size divides the usual size. An operation that needs the usual shape fits
them to it.
"""

from __future__ import annotations

import torch

ROWS, COLUMNS = 4, 8
SIZE = ROWS * COLUMNS


def fitted(x: torch.Tensor) -> torch.Tensor:
    if x.shape == (ROWS, COLUMNS):
        return x
    count = x.numel()
    if count == SIZE:
        return x.reshape(ROWS, COLUMNS)
    return x.reshape(1, -1).expand(SIZE // count, count).reshape(ROWS, COLUMNS)
