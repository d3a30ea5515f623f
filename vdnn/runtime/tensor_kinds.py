"""Which tensors are plain memory that may be moved: strided ones of torch's own classes, fake ones, a DTensor's part.

Everything else (sparse, quantized, nested, unknown subclasses) is passed through untouched.
"""

from __future__ import annotations

import sys

import torch
from torch._subclasses.fake_tensor import FakeTensor

PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)

_VIEWS = frozenset({"TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0", "PermuteBackward0"})


def has_plain_storage(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN_CLASSES and tensor.layout is torch.strided and not tensor.is_quantized


def plain_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """Of a DTensor the part that is here, if that is plain; of a plain tensor itself."""
    if type(tensor) in PLAIN_CLASSES:
        return tensor if has_plain_storage(tensor) else None
    tensors = sys.modules.get("torch.distributed.tensor")  # which takes a second to import
    if tensors is None or type(tensor) is not tensors.DTensor or tensor.dtype.is_complex:
        return None  # a lazy conjugate has a bit on the wrapper, too
    part: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    # Of a collective that nobody has waited for it is a class of its own: asking for its bytes would wait.
    return part if has_plain_storage(part) else None


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
