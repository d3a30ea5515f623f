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


def is_cast_of_a_leaf(node: torch.autograd.graph.Node) -> bool:
    """Whether this is the node of autocast's cast of a parameter, or of another leaf."""
    if node.name() != "ToCopyBackward0":
        return False
    source = node.next_functions[0][0]
    return source is not None and source.name() == "torch::autograd::AccumulateGrad"
