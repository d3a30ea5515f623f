"""Which tensors are plain memory that may be moved: strided ones of torch's own classes, and fake ones.

Everything else (sparse, quantized, nested, DTensor, unknown subclasses) is passed through untouched.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


def has_plain_storage(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN_CLASSES and tensor.layout is torch.strided and not tensor.is_quantized


def is_fake(tensor: torch.Tensor) -> bool:
    """Without data."""
    return type(tensor) is FakeTensor
