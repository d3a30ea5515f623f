"""The time of an operation on given hardware: the longer of its arithmetic and its memory traffic, plus its launch.

Arithmetic follows torch's own FLOP formulas, and traffic is what kernels read and write (memory_traffic.py). How much
of the card's peaks an operation reaches depends on its class (operation_class.py). A product or a convolution takes the
time in addition in which its kernel fills the card, and a product that in which its tiles begin and end. Views and bare
allocations take no time. Measured times differ. The model promises that a step takes the same time on every machine
that simulates it, and that the proportions of layers are right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from vdnn.hardware import HardwareProfile
from vdnn.hardware.operation_classes import LAYOUT_CONVERSION
from vdnn.runtime.machine.memory_traffic import touched_bytes, traffic_bytes
from vdnn.runtime.machine.operation_class import (
    bandwidth_class,
    compute_classes,
    converted_maps,
    inner_size,
    kernel_count,
    padded_share,
)

_DTYPE_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_TENSOR_CORES = ("tf32", "float16", "bfloat16")
# These operations make tensors, change their storage or look at one in another shape, and run no kernel. The last two
# are views whose schema does not say so: torch.matmul uses them.
_NO_KERNEL = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_", "detach_", "device"}
    | {"_unsafe_view", "_reshape_alias"}
)


def operation_ns(profile: HardwareProfile, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """The time of one call of an aten operation. Works on tensors without data."""
    packet = func._overloadpacket
    if func.is_view or packet.__name__ in _NO_KERNEL:
        return 0
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    if not tensors and not written:
        return 0
    name = packet.__name__
    reached = profile.bandwidth_efficiency_of(bandwidth_class(name))
    traffic = traffic_bytes(func, args, kwargs, out)
    traffic_ns = traffic / (profile.memory_bytes_per_s * reached) * 1e9
    flop = _flop(packet, args, kwargs, out)
    if not flop:
        return round(traffic_ns) + profile.kernel_launch_ns
    classes, dtype = compute_classes(name, args), _dtype_of(profile, name, tensors)
    arithmetic_ns = flop / (profile.flop_per_s[dtype] * profile.compute_efficiency_of(classes, dtype)) * 1e9
    arithmetic_ns *= _tile_factor(profile, name, args, f"{classes[-1]}.{dtype}")
    if dtype in _TENSOR_CORES:
        arithmetic_ns *= padded_share(name, args)
    fill_ns = profile.fill_ns.get(f"{classes[-1]}.{dtype}", 0) * kernel_count(name, args)
    converting_ns = _converting_ns(profile, name, args, out) if dtype in _TENSOR_CORES else 0.0
    return round(max(traffic_ns, arithmetic_ns) + converting_ns) + fill_ns + profile.kernel_launch_ns


def _tile_factor(profile: HardwareProfile, name: str, args: tuple[Any, ...], key: str) -> float:
    """How much longer a product takes because each of its tiles begins and ends: by more if they are short."""
    overhead, inner = profile.tile_overhead.get(key, 0), inner_size(name, args)
    return 1 + overhead / inner if inner else 1.0


def runs_on_tensor_cores(profile: HardwareProfile, name: str, args: tuple[Any, ...]) -> bool:
    """Does the operation of this name multiply on tensor cores, with these arguments?"""
    return _dtype_of(profile, name, [one for one in args if isinstance(one, torch.Tensor)]) in _TENSOR_CORES


def _converting_ns(profile: HardwareProfile, name: str, args: tuple[Any, ...], out: Any) -> float:
    """The time in which the maps of a convolution are read and written in another layout, in kernels of their own."""
    reached = profile.efficiency.get(LAYOUT_CONVERSION)
    if reached is None:
        return 0.0
    moved = 2 * sum(touched_bytes(one) for one in converted_maps(name, args, out))
    return moved / (profile.memory_bytes_per_s * reached) * 1e9


# The CPU's, which torch's registry lacks, stands for a GPU's in a rehearsal.
_KERNELS = "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"
_ATTENTION = frozenset(f"_scaled_dot_product_{one}" for one in _KERNELS)
_ATTENTION_BACKWARD = frozenset(f"{one}_backward" for one in _ATTENTION)


def _flop(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    name = packet.__name__
    if name in _ATTENTION:
        return int(sdpa_flop_count(*_of_all_heads(args[:3])))  # type: ignore[no-untyped-call]
    if name in _ATTENTION_BACKWARD:
        return int(sdpa_backward_flop_count(*_of_all_heads(args[:4])))  # type: ignore[no-untyped-call]
    if name == "convolution_backward":
        # torch's formula counts the gradient of a grouped weight once for each group. Each of both takes what the
        # forward pass takes.
        gradient, x, weight = args[:3]
        of_one = conv_flop_count(list(x.shape), list(weight.shape), list(gradient.shape), transposed=args[7])
        return int(of_one * sum(args[-1][:2]))
    return int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0


def _of_all_heads(tensors: tuple[torch.Tensor, ...]) -> list[torch.Size]:
    """The shapes of an attention's tensors, as if keys and values had a head for each of the queries: the kernel reads
    each for several of them. Before torch 2.12 its formulas refuse others."""
    heads = tensors[0].shape[1]
    return [torch.Size((one.shape[0], heads, *one.shape[2:])) for one in tensors]


def _dtype_of(profile: HardwareProfile, operation: str, tensors: list[torch.Tensor]) -> str:
    """The dtype of the peak by which the operation is computed."""
    name = next((_DTYPE_NAMES[one.dtype] for one in tensors if one.dtype in _DTYPE_NAMES), "float32")
    if name == "float32" and _uses_tf32(operation):
        name = "tf32"
    return name if name in profile.flop_per_s else "float32"


def _uses_tf32(operation: str) -> bool:
    """Reads torch's precisions: its older switches raise once a precision was set. By default convolutions use TF32 if
    the hardware has it, and matrix products do not."""
    cudnn: Any = torch.backends.cudnn
    backend = cudnn.conv if "convolution" in operation else torch.backends.cuda.matmul
    return bool(backend.fp32_precision == "tf32")
