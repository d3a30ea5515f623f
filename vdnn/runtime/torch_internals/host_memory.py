"""Tells memory of the host from that of a device, where both are tensors of the CPU: in a virtual machine."""

from __future__ import annotations

import torch

_MARK = "is_memory_of_the_host"  # torch keeps the Python object of a storage for as long as the storage


def is_host_memory(storage: torch.UntypedStorage) -> bool:
    return hasattr(storage, _MARK)


def as_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, whose memory, and so that of its views, is noted as the host's."""
    setattr(tensor.untyped_storage(), _MARK, True)
    return tensor
