"""The settings of torch that choose between kernels: two results may differ in a bit where one of them differs."""

from __future__ import annotations

import torch

_C = torch._C


def backend_flags() -> tuple[object, ...]:
    """As they are now."""
    return (
        _C._get_deterministic_algorithms(),
        _C._get_cudnn_enabled(),
        _C._get_cudnn_benchmark(),
        _C._get_cudnn_deterministic(),
        _C._get_cudnn_allow_tf32(),
        _C._get_cublas_allow_tf32(),
        _C._get_float32_matmul_precision(),
        _C._get_mkldnn_enabled(),
        _C._get_math_sdp_enabled(),
        _C._get_flash_sdp_enabled(),
        _C._get_mem_efficient_sdp_enabled(),
        _C._get_cudnn_sdp_enabled(),
        torch.get_num_threads(),
    )
