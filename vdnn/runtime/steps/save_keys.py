"""What the saves of a step are recognised by from step to step."""

from __future__ import annotations

from collections import Counter

import torch

from vdnn.runtime.steps.kinds import NO_SAVES, kind_with
from vdnn.step.recording import SaveKey


class SaveKeys:
    """Of one step."""

    def __init__(self) -> None:
        self._occurrences: Counter[tuple[object, ...]] = Counter()
        self.first: SaveKey | None = None
        self.kind = NO_SAVES  # of the step, as far as it is

    def key(self, tensor: torch.Tensor, module: str) -> SaveKey:
        """Of the next save. `module` is the path of the innermost whose forward runs."""
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
