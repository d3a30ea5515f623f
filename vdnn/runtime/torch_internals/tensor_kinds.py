"""Which tensors are plain memory of their own, which may be moved: strided ones of torch's own classes, fake ones, a
DTensor's part.

Everything else passes through untouched, wherever the runtime looks at tensors: what is sparse, quantized, nested or
meta, unknown subclasses, what torch.func wraps (batches, levels of differentiation, functionalization), zeros that
forward mode makes without memory, and whatever a tracer follows.

[Note: Tracers] A tracer knows a tensor by its identity. What a hook makes anew of the same bytes is unknown to it, and
becomes a constant of the traced program. So under make_fx, and torch.export, the hooks step aside
(function_transforms.py), and what else happens under proxies or functional tensors passes through. Our own modes and
FakeTensorMode are dispatch modes too, and trace nothing. The same goes for what runs inside of torch.func's transforms:
there a module sees one tensor and autograd saves another, with the batch in it, so that what is known of the one is not
true of the other.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import torch
import torch._functorch.pyfunctorch
from torch._subclasses.fake_tensor import FakeTensor

CLASSES_WITH_DATA = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
PLAIN_CLASSES = (*CLASSES_WITH_DATA, FakeTensor)

# Asked by the hooks themselves, at every save and use: how many modes there are, and in which of torch.func's
# transforms this thread is (None in none).
modes_here = torch._C._len_torch_dispatch_stack
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
_mode_here = torch._C._get_dispatch_mode
_PROXY, _FUNCTIONAL = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL
_is_functional = torch._is_functional_tensor
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_without_transforms = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
_NO_TRANSFORM = contextlib.nullcontext()

CAST = "ToCopyBackward0"
_VIEWS = frozenset({"TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0", "PermuteBackward0"})


def has_plain_storage(tensor: torch.Tensor) -> bool:
    if type(tensor) not in PLAIN_CLASSES or tensor.layout is not torch.strided or _is_wrapped(tensor):
        return False
    if type(tensor) is FakeTensor and (tensor._has_symbolic_sizes_strides or is_traced()):
        return False  # to look at how large its storage is would tie the traced program to it
    return has_own_memory(tensor)


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Of a strided tensor of one of PLAIN_CLASSES that is not wrapped by torch.func."""
    return not (
        tensor.is_quantized or tensor.is_nested or tensor.is_meta or tensor._is_zerotensor() or _is_functional(tensor)
    )


def is_traced() -> bool:
    """Whether a tracer, or a transform of torch.func, follows what this thread does. See [Note: Tracers]."""
    if transform_level() is not None:
        return True
    return bool(modes_here()) and (_mode_here(_PROXY) is not None or _mode_here(_FUNCTIONAL) is not None)


def outside_of_transforms() -> contextlib.AbstractContextManager[object]:
    """For what is done of the runtime's own accord in a backward that runs inside of vmap (`is_grads_batched`) or of
    another transform: to torch.func it is no part of the function."""
    return _NO_TRANSFORM if transform_level() is None else _without_transforms()


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """That of a strided tensor, or of a DTensor's part here; None where there is none. Whether it may be moved is
    another question: this one is asked of every parameter at every call of a module."""
    part: torch.Tensor | None = tensor
    if type(tensor) not in CLASSES_WITH_DATA or tensor.layout is not torch.strided:
        part = plain_part(tensor)
    try:
        return None if part is None else part.untyped_storage()
    except NotImplementedError:  # torch.func wraps it
        return None


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


def is_cast_of_a_leaf(node: torch.autograd.graph.Node) -> bool:
    """Whether this is the node of autocast's cast of a parameter, or of another leaf."""
    if type(node).__name__ != CAST:  # its name(), without a call
        return False
    source = node.next_functions[0][0]
    return source is not None and source.name() == "torch::autograd::AccumulateGrad"


def is_view_of_a_cast(node: torch.autograd.graph.Node) -> bool:
    """The same of a view of it, such as the transposed weight that a linear layer saves."""
    if node.name() in _VIEWS and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return is_cast_of_a_leaf(node)
