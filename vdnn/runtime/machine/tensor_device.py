"""A stand-in for a torch device without a GPU: the tensors that it applies to, and their native device."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable

from vdnn import _C


class TensorDevice(ABC):
    """Treats tensors on torch devices of type `torch_type` as memory of `device`. `fake`: the tensors have no data."""

    torch_type: str = "cpu"
    fake: bool = False
    device: _C.Device

    @abstractmethod
    def current_stream(self) -> _C.Stream:
        """The stream on which torch computes now, on this thread."""

    @property
    def is_entered(self) -> bool:
        """False for a context manager that was not entered: it does not see what its tensors do."""
        return True

    @functools.cached_property
    def kept_for_sessions(self) -> dict[Hashable, object]:
        """Engines that sessions on this device keep for later ones, by their options."""
        return {}
