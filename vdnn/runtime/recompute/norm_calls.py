"""Notes the arguments of norms that autograd's nodes do not save. They are read from the call.

Layer norm and RMS norm do not save their eps; batch, group and instance norm do not save whether a bias was given, and
group norm saves its eps in older versions of torch only (2.13 does, 2.15 does not).
While the forward of a norm module runs, a torch function mode sees the calls of torch's norm functions and notes these
facts on the node that the call made. A node from any other call has no facts, and that norm is not recomputed.

The mode is pushed for torch's norm modules, their subclasses, and modules without children whose `forward` names a
norm function. It is not pushed while torch traces or transforms functions, nor on top of a mode of the program: such
a mode, or a tensor subclass, may call the norm with other arguments than it was given.

[Note: Plain norms] The call of an exact class of torch can be read from the module's attributes, if nothing is patched
and nothing sees the call (no mode, no hook but the session's). csrc/hooks/plain_norms.cpp does that, without a mode, in
a twentieth of the time. `plain_norms` says what it has to find.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import BaseTorchFunctionMode
from torch.utils._device import DeviceContext

from vdnn._C import PlainNorms, norm_was_made, note_fact
from vdnn.runtime.recompute.node_notes import EPS, NO_BIAS
from vdnn.runtime.torch_internals.tensor_kinds import CLASSES_WITH_DATA, PLAIN_CLASSES, num_dispatch_modes

_hooks: Any = torch.nn.modules.module
_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
_push = torch._C._push_on_torch_function_stack
_pop = torch._C._pop_torch_function_stack
_depth = torch._C._len_torch_function_stack
_at = torch._C._get_function_stack_at

_NORMS = (_NormBase, torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)
_NAMES = frozenset(
    f"{prefix}{name}_norm" for name in ("layer", "rms", "batch", "group", "instance") for prefix in ("", "native_")
)
_NORM_NODES = frozenset(
    (
        "NativeLayerNormBackward0",
        "NativeBatchNormBackward0",
        "CudnnBatchNormBackward0",
        "MiopenBatchNormBackward0",
        "NativeGroupNormBackward0",
        "FusedRmsNormBackward0",
    )
)
_PLAIN = frozenset(PLAIN_CLASSES)  # other classes may change the arguments
_AFTER_NORM = 4  # nodes that one call may make after its norm: views, casts


class _Reads(NamedTuple):
    """An argument that the node does not save: its keyword, position and default in a function's signature."""

    keyword: str
    position: int
    default: float | None


def _signatures() -> dict[Any, tuple[_Reads, ...]]:
    bias, eps = "bias", "eps"
    one = {
        functional.layer_norm: _Reads(eps, 4, 1e-5),
        torch.layer_norm: _Reads(eps, 4, 1e-5),
        torch.native_layer_norm: _Reads(eps, 4, None),
        functional.rms_norm: _Reads(eps, 3, None),
        torch.rms_norm: _Reads(eps, 3, None),
        functional.batch_norm: _Reads(bias, 4, None),
        torch.batch_norm: _Reads(bias, 2, None),
        torch.native_batch_norm: _Reads(bias, 2, None),
        functional.instance_norm: _Reads(bias, 4, None),
        torch.instance_norm: _Reads(bias, 2, None),
    }
    several = {
        functional.group_norm: (_Reads(bias, 3, None), _Reads(eps, 4, 1e-5)),
        torch.group_norm: (_Reads(bias, 3, None), _Reads(eps, 4, 1e-5)),
        torch.native_group_norm: (_Reads(bias, 2, None), _Reads(eps, 7, None)),
    }
    return {**{norm: (reads,) for norm, reads in one.items()}, **several}


_SIGNATURES = _signatures()
# If a program replaces one of torch's Python functions, modes receive the replacement instead of the original: see
# _is_patched. If it replaces a native one, the Python function calls that with arguments that no mode sees.
_PYTHON_NORMS = tuple((functional, one.__name__, one) for one in _SIGNATURES if isinstance(one, FunctionType))
_NATIVE_NORMS = tuple((torch, one.__name__, one) for one in _SIGNATURES if isinstance(one, BuiltinFunctionType))


class _Here(threading.local):
    """The module around whose forward this thread has pushed the mode."""

    def __init__(self) -> None:
        self.module: torch.nn.Module | None = None


class _NormCalls(BaseTorchFunctionMode):  # type: ignore[misc,unused-ignore]
    """Notes facts on the nodes of the norms that are called, and passes every call through."""

    def __init__(self, here: _Here) -> None:
        super().__init__()
        self._here = here

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        reads = _SIGNATURES.get(func)
        if reads is None or not _PLAIN.issuperset(types):
            return func(*args, **kwargs)
        begin = _sequence_nr()
        made = func(*args, **kwargs)
        for one in reads:
            given = kwargs.get(one.keyword, one.default)
            number = _note(made, begin, one, args[one.position] if len(args) > one.position else given)
            if number is not None and self._here.module is not None:
                norm_was_made(number, self._here.module)
        return made


def _note(made: Any, begin: int, reads: _Reads, given: Any) -> int | None:
    """Note the fact on the norm's node, which was created after `begin`. Return the node's sequence number."""
    output = made[0] if isinstance(made, tuple) else made
    node = output.grad_fn if isinstance(output, torch.Tensor) else None
    end = _sequence_nr()
    for _ in range(_AFTER_NORM):
        if node is None:
            return None
        number: int = node._sequence_nr()
        if number < begin or number >= end:
            return None  # made before the call, or on another thread
        if node.name() in _NORM_NODES:
            if reads.keyword == "bias":
                note_fact(node, NO_BIAS, given is None)
            elif given is None or isinstance(given, (int, float)):
                note_fact(node, EPS, None if given is None else float(given))
            return number
        edges = node.next_functions
        node = edges[0][0] if edges else None
    return None


class NormWatch:
    """Pushes the mode around the forwards of norm modules, for each thread. Torch's module hooks call `enter` and
    `leave`. If an exception left the mode on the stack, the next call of either removes it."""

    def __init__(self) -> None:
        self._here = _Here()
        self._mode = _NormCalls(self._here)
        self._kinds: dict[type[torch.nn.Module], bool] = {}

    def enter(self, module: torch.nn.Module) -> None:
        kind = type(module)
        calls_norms = self._kinds.get(kind)
        if calls_norms is None:
            calls_norms = self._kinds[kind] = _calls_norms(kind)
        if not calls_norms:
            return
        self.remove()
        if (module._modules and not isinstance(module, _NORMS)) or not _may_push(module):
            return
        self._here.module = module
        _push(self._mode)

    def leave(self, module: torch.nn.Module) -> None:
        if self._here.module is module:
            self.remove()

    def remove(self) -> None:
        """Take this thread's mode off the stack, if it is on top. Modes of the program stay where they are."""
        if self._here.module is None:
            return
        depth = _depth()
        if depth and _at(depth - 1) is self._mode:
            _pop()
        self._here.module = None


def _calls_norms(kind: type[torch.nn.Module]) -> bool:
    """True if the mode is worth its cost in the forward of this class."""
    forward = getattr(kind, "forward", None)
    if issubclass(kind, torch.jit.ScriptModule) or hasattr(forward, "_torchdynamo_orig_callable"):
        return False
    if issubclass(kind, _NORMS):
        return True
    return isinstance(forward, FunctionType) and not _NAMES.isdisjoint(forward.__code__.co_names)


def _may_push(module: torch.nn.Module) -> bool:
    depth = _depth()
    if depth and not all(_passes_on(_at(index)) for index in range(depth)):
        return False
    if hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable"):
        return False
    if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None and not _is_patched()


def _passes_on(mode: object) -> bool:
    """True if a mode below ours calls norms with the arguments that it is given, and does not pop ours at its exit."""
    return type(mode) is DeviceContext or getattr(mode, "passes_norms_on", False)


def remove_stale_mode() -> None:
    """Called at the exit of a mode that may be below ours. An interrupt skips module hooks, and then our mode is still
    on top."""
    while _depth() and isinstance(_at(_depth() - 1), _NormCalls):
        _pop()


def _is_patched() -> bool:
    """True if a program has replaced one of torch's functions. Under a mode those of Python pass on what their global
    name refers to, so a wrapper under that name would run twice."""
    for module, name, one in (*_PYTHON_NORMS, *_NATIVE_NORMS):
        if getattr(module, name) is not one:
            return True
    return not _ARE_ORIGINAL


_ARE_ORIGINAL = all(one.__code__.co_filename == functional.__file__ for _, _, one in _PYTHON_NORMS)


# See [Note: Plain norms].


def _plain_kinds() -> tuple[Any, ...]:
    """Class, forward, whether eps and bias are noted, and what names refer to if nothing is patched."""
    batch = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    kinds: dict[type[nn.Module], tuple[str, bool, bool]] = {
        nn.LayerNorm: ("layer_norm", True, False),
        nn.RMSNorm: ("rms_norm", True, False),
        nn.GroupNorm: ("group_norm", True, True),
        **dict.fromkeys(batch, ("batch_norm", False, True)),
    }
    found = []
    for kind, (name, reads_eps, reads_bias) in kinds.items():
        forward, python, native = kind.forward, getattr(functional, name), getattr(torch, name)
        names = {name, *(("eps",) if reads_eps else ()), *(("bias",) if reads_bias else ())}
        if not isinstance(forward, FunctionType) or not isinstance(native, BuiltinFunctionType) or not _ARE_ORIGINAL:
            continue
        module = inspect.getmodule(forward)
        if (
            module is None
            or not module.__name__.startswith("torch.nn.modules.")
            or not names <= {*forward.__code__.co_names}
        ):
            continue
        globals_ = (
            (forward.__globals__, "F", functional),
            (vars(functional), name, python),
            (vars(functional), "torch", torch),
            (vars(torch), name, native),
        )
        found.append((kind, forward, reads_eps, reads_bias, globals_))
    return tuple(found)


plain_norms = PlainNorms(
    _plain_kinds(),
    (
        (_depth, 0),
        (num_dispatch_modes, 0),
        (torch._C._get_tracing_state, None),
        (torch._C._functorch.peek_interpreter_stack, None),
    ),
    (_hooks._global_forward_pre_hooks, _hooks._global_forward_hooks),
    CLASSES_WITH_DATA,
    _NORM_NODES,
    torch._C.TensorBase.grad_fn,
)
