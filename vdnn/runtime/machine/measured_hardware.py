"""A hardware profile of the GPU in this machine, with link, arithmetic and memory measured in a second or two.

`python -m vdnn plan --hardware measured` plans with this profile. The latencies of a copy and of a kernel launch are
the times of a copy of 4096 bytes and of a kernel on one element.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vdnn import _C
from vdnn.errors import VdnnError
from vdnn.hardware import HardwareProfile
from vdnn.hardware.hardware_profile import FRACTIONS, WHOLE_FIGURES
from vdnn.hardware.link_probe import measure_link

_SIDE = 4096  # rows and columns of the matrices that are multiplied
_BLOCK_BYTES = 256 << 20
_REPEATS = 20
_SMALL_BYTES = 4096
_FIRST_WITH_TF32 = 8  # major compute capability
_LEAST_NS = 1  # a profile refuses figures of zero
_SOURCE = "measured on this machine"


def measured_profile(ordinal: int = 0) -> HardwareProfile:
    """Measures GPU number `ordinal`. Raises VdnnError if torch cannot use a GPU."""
    if not torch.cuda.is_available():
        raise VdnnError(
            "hardware: 'measured' needs a GPU that torch can use, but there is none: name a profile instead."
        )
    device = torch.device("cuda", ordinal)
    properties = torch.cuda.get_device_properties(device)
    native = _C.CudaDevice(ordinal)
    try:
        link = measure_link(native)
    finally:
        native.close()
    flop_per_s = {
        "float32": _float32_flop_per_s(device, "ieee"),
        "float16": _flop_per_s(device, torch.float16),
        "bfloat16": _flop_per_s(device, torch.bfloat16),
    }
    if properties.major >= _FIRST_WITH_TF32:
        flop_per_s["tf32"] = _float32_flop_per_s(device, "tf32")
    fastest = int(max(link.to_host_bytes_per_s, link.to_device_bytes_per_s))
    return HardwareProfile(
        name=str(properties.name),
        description=f"{properties.name}, {_SOURCE}",
        memory_bytes=int(properties.total_memory),
        flop_per_s=flop_per_s,
        memory_bytes_per_s=_memory_bytes_per_s(device),
        to_host_bytes_per_s=int(link.to_host_bytes_per_s),
        to_device_bytes_per_s=int(link.to_device_bytes_per_s),
        duplex_bytes_per_s=max(fastest, int(link.both_ways_bytes_per_s)),
        link_latency_ns=_link_latency_ns(device),
        kernel_launch_ns=_kernel_launch_ns(device),
        compute_efficiency=1.0,  # the measured rates are those that kernels reach
        bandwidth_efficiency=1.0,
        sources=dict.fromkeys((*WHOLE_FIGURES, *FRACTIONS, *(f"flop_per_s.{name}" for name in flop_per_s)), _SOURCE),
    )


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The mean time of one call by the device's clock, after a call that warms up."""
    work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        begin.record()
        for _ in range(_REPEATS):
            work()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _REPEATS


def _float32_flop_per_s(device: torch.device, precision: str) -> int:
    """The rate of products of float32 at a precision, whatever the program has set."""
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, precision
    try:
        return _flop_per_s(device, torch.float32)
    finally:
        products.fp32_precision = before


def _flop_per_s(device: torch.device, dtype: torch.dtype) -> int:
    left = torch.randn(_SIDE, _SIDE, device=device, dtype=dtype)
    return int(2 * _SIDE**3 / _seconds(device, lambda: left @ left))


def _memory_bytes_per_s(device: torch.device) -> int:
    # The copy reads each byte once and writes it once.
    block = torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)
    return int(2 * _BLOCK_BYTES / _seconds(device, lambda: target.copy_(block)))


def _link_latency_ns(device: torch.device) -> int:
    host = torch.empty(_SMALL_BYTES, dtype=torch.uint8, pin_memory=True)
    small = torch.empty(_SMALL_BYTES, dtype=torch.uint8, device=device)
    return max(_LEAST_NS, int(_seconds(device, lambda: small.copy_(host, non_blocking=True)) * 1e9))


def _kernel_launch_ns(device: torch.device) -> int:
    small = torch.zeros(1, device=device)
    return max(_LEAST_NS, int(_seconds(device, lambda: small.add_(1)) * 1e9))
