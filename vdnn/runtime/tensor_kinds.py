"""Which tensors are plain memory that may be moved: strided ones of torch's own classes, and fake ones.

Everything else (sparse, quantized, nested, DTensor, unknown subclasses) is passed through untouched.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)

_VIEWS = frozenset({"TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0", "PermuteBackward0"})


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


def is_view_of_a_cast(node: torch.autograd.graph.Node) -> bool:
    """The same of a view of it, such as the transposed weight that a linear layer saves."""
    if node.name() in _VIEWS and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return is_cast_of_a_leaf(node)
