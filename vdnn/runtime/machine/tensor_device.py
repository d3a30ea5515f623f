"""What stands for a torch device where no GPU does: which tensors it means, and the native device they lie on."""

from __future__ import annotations

from abc import ABC, abstractmethod

from vdnn import _C


class TensorDevice(ABC):
    """Tensors whose device is of type `torch_type` lie on `device`. `fake`: they have no data."""

    torch_type: str = "cpu"
    fake: bool = False
    device: _C.Device

    @abstractmethod
    def current_stream(self) -> _C.Stream:
        """The stream on which torch computes now, on this thread."""
