"""A stand-in for a torch device without a GPU: the tensors that it applies to, and their native device."""

from __future__ import annotations

from abc import ABC, abstractmethod

from vdnn import _C


class TensorDevice(ABC):
    """Treats tensors on torch devices of type `torch_type` as memory of `device`. `fake`: the tensors have no data."""

    torch_type: str = "cpu"
    fake: bool = False
    device: _C.Device

    @abstractmethod
    def current_stream(self) -> _C.Stream:
        """The stream on which torch computes now, on this thread."""
