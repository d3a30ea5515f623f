"""Decides which tensors are plain memory that may move: strided tensors of torch's own classes, FakeTensors, and the
local part of a DTensor.

All other tensors pass through: sparse, quantized, nested and meta tensors, unknown subclasses, the wrappers of
torch.func, the zeros that forward mode makes without memory, and any tensor that a tracer follows.

[Note: Tracers] A tracer identifies a tensor by its Python object. A tensor that a hook makes of the same bytes is
unknown to it and becomes a constant of the traced program. So the hooks step aside under make_fx and torch.export
(function_transforms.py), and other saves under proxies or functional tensors pass through. Our own modes and
FakeTensorMode are dispatch modes too, but trace nothing. Saves inside transforms of torch.func also pass through: there
autograd saves another tensor than the module sees, one that contains the batch, so facts about one do not hold for the
other.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch
import torch._functorch.pyfunctorch
from torch._subclasses.fake_tensor import FakeTensor

CLASSES_WITH_DATA = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
PLAIN_CLASSES = (*CLASSES_WITH_DATA, FakeTensor)

# The hooks call these two at every save and use: the number of active dispatch modes, and the level of the torch.func
# transform that this thread is in (None outside of transforms).
num_dispatch_modes = torch._C._len_torch_dispatch_stack
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
_trace_of_jit: Callable[[], object] = torch._C._get_tracing_state
_set_trace_of_jit: Callable[[object], None] = torch._C._set_tracing_state  # type: ignore[attr-defined]
_mode_of = torch._C._get_dispatch_mode
_PROXY, _FUNCTIONAL = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL
_is_functional = torch._is_functional_tensor
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_without_transforms = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
_UNCHANGED = contextlib.nullcontext()

CAST = "ToCopyBackward0"
_VIEWS = frozenset({"TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0", "PermuteBackward0"})


def has_plain_storage(tensor: torch.Tensor) -> bool:
    if type(tensor) not in PLAIN_CLASSES or tensor.layout is not torch.strided or _is_wrapped(tensor):
        return False
    if type(tensor) is FakeTensor and (tensor._has_symbolic_sizes_strides or is_traced()):
        return False  # reading the size of its storage would make that size a constant of the traced program
    return has_own_memory(tensor)


def has_own_memory(tensor: torch.Tensor) -> bool:
    """True if a tensor has memory. Only for strided tensors of PLAIN_CLASSES that torch.func does not wrap."""
    return not (
        tensor.is_quantized or tensor.is_nested or tensor.is_meta or tensor._is_zerotensor() or _is_functional(tensor)
    )


def is_traced() -> bool:
    """True if a tracer or a transform of torch.func is active on this thread. See [Note: Tracers]."""
    if transform_level() is not None:
        return True
    return bool(num_dispatch_modes()) and (_mode_of(_PROXY) is not None or _mode_of(_FUNCTIONAL) is not None)


def is_jit_traced() -> bool:
    """True while torch.jit.trace runs on this thread: what it makes reads parameters where no hook is."""
    return _trace_of_jit() is not None


def outside_of_transforms() -> contextlib.AbstractContextManager[object]:
    """A context in which torch.func does not transform operations and torch.jit.trace does not record them, for the
    runtime's own operations in a backward pass inside vmap (`is_grads_batched`), another transform, or a trace."""
    if is_jit_traced():
        return _without_trace()
    return _UNCHANGED if transform_level() is None else _without_transforms()


@contextlib.contextmanager
def _without_trace() -> Iterator[None]:
    trace = _trace_of_jit()
    _set_trace_of_jit(None)
    try:
        with outside_of_transforms():
            yield
    finally:
        _set_trace_of_jit(trace)


def outside_of_inference_mode() -> contextlib.AbstractContextManager[object]:
    """A context in which tensors are ordinary ones. `torch.inference_mode(False)` takes several microseconds, so it is
    entered only where that changes anything."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _UNCHANGED


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a strided tensor or of a DTensor's local part; None for a tensor without one.

    It does not test if the storage may move. Called for every parameter at every module call, so it has to be fast.
    """
    part: torch.Tensor | None = tensor
    if type(tensor) not in CLASSES_WITH_DATA or tensor.layout is not torch.strided:
        part = plain_part(tensor)
    try:
        return None if part is None else part.untyped_storage()
    except NotImplementedError:  # torch.func wraps it
        return None


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages that hold its bytes: those of the indices and values of a sparse tensor. Empty if it has no bytes
    of its own."""
    if tensor.layout is torch.sparse_coo:
        return [*storages_of(tensor._indices()), *storages_of(tensor._values())]
    storage = storage_of(tensor)
    return [] if storage is None else [storage]


def plain_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """A plain tensor itself, or the local part of a DTensor if that is plain; None for any other tensor."""
    if type(tensor) in PLAIN_CLASSES:
        return tensor if has_plain_storage(tensor) else None
    tensors = sys.modules.get("torch.distributed.tensor")  # importing it takes a second
    if tensors is None or type(tensor) is not tensors.DTensor or tensor.dtype.is_complex:
        return None  # a complex DTensor may have a conjugate bit on the wrapper as well
    part: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    # The result of a collective that is not waited for is an AsyncCollectiveTensor: reading its bytes would wait.
    return part if has_plain_storage(part) else None


def is_cast_of_a_leaf(node: torch.autograd.graph.Node) -> bool:
    """True if `node` is autocast's cast of a parameter or another leaf."""
    if type(node).__name__ != CAST:  # the same as node.name(), without a call
        return False
    source = node.next_functions[0][0]
    return source is not None and source.name() == "torch::autograd::AccumulateGrad"


def is_view_of_a_cast(node: torch.autograd.graph.Node) -> bool:
    """True for such a cast, and for a view of one, such as the transposed weight that a linear layer saves."""
    if node.name() in _VIEWS and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return is_cast_of_a_leaf(node)
