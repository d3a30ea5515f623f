"""Turns on torch's deterministic algorithms, for steps whose gradients are compared bit for bit.

A model with an operation that has no deterministic algorithm runs without `strict`, and the result says so.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def deterministic(*, strict: bool) -> Iterator[None]:
    """A context with deterministic algorithms. With `strict` an operation without one raises. cuBLAS needs
    CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment from the start."""
    was, was_warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    was_benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    torch.backends.cudnn.benchmark = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=was_warn_only)
        torch.backends.cudnn.benchmark = was_benchmark
