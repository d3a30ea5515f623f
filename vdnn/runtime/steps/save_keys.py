"""Makes the save keys of a step, by which its saves are recognized in other steps."""

from __future__ import annotations

from collections import Counter

import torch

from vdnn.runtime.steps.kinds import NO_SAVES, kind_with
from vdnn.step.recording import SaveKey


class SaveKeys:
    """The save keys of one step, and its kind."""

    def __init__(self) -> None:
        self._occurrences: Counter[tuple[object, ...]] = Counter()
        self.first: SaveKey | None = None
        self.kind = NO_SAVES  # the kind of the step so far

    def key(self, tensor: torch.Tensor, module: str) -> SaveKey:
        """The key of the next save. `module` is the path of the innermost module whose forward runs."""
        node = tensor.grad_fn
        alike = (
            "" if node is None else node.name(),
            module,
            str(tensor.dtype).removeprefix("torch."),
            tuple(int(size) for size in tensor.shape),
            tuple(int(stride) for stride in tensor.stride()),
        )
        occurrence = self._occurrences[alike]
        self._occurrences[alike] = occurrence + 1
        key = SaveKey(*alike, occurrence)
        if self.first is None:
            self.first = key
        self.kind = kind_with(self.kind, key)
        return key
