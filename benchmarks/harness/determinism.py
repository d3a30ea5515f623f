"""Turns on torch's deterministic algorithms, for steps whose gradients are compared bit for bit.

Without `strict`, an operation that has no deterministic algorithm runs as it is.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.deterministic


@contextlib.contextmanager
def deterministic(*, strict: bool) -> Iterator[None]:
    """A context with deterministic algorithms. With `strict` an operation without one raises. cuBLAS needs
    CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment from the start."""
    was, was_warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    was_benchmark = torch.backends.cudnn.benchmark
    settings: Any = torch.utils.deterministic
    was_filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    torch.backends.cudnn.benchmark = False
    # torch would fill every empty tensor, which takes time and shows only programs that read what nobody wrote.
    settings.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=was_warn_only)
        torch.backends.cudnn.benchmark = was_benchmark
        settings.fill_uninitialized_memory = was_filled
