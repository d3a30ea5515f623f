"""What pack hands to autograd for a tensor that stays on the device.

A leaf is returned itself: it may be swapped under us (FSDP, ZeRO-3), and then the new content is meant. A non-leaf is
held as detach(): returning an output itself would keep its graph alive for ever if that dies without a backward.
"""

from __future__ import annotations

import torch

from vdnn.runtime.version_check import raise_modified


class KeptTensor:
    """The tensor and the version it had."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.version = tensor._version
        self.tensor = tensor if tensor.is_leaf else tensor.detach()

    def unpack(self) -> torch.Tensor:
        tensor = self.tensor
        if tensor._version != self.version:
            raise_modified(tensor.type(), tuple(tensor.shape), tensor._version, self.version)
        return tensor
