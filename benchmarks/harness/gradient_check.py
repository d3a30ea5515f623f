"""Gradients of a step under deterministic algorithms, compared with those of the plain step bit for bit.

The reference stays on the CPU, so that it is in no way's peak. Deterministic algorithms are asked for strictly; of a
model with an operation that has none they are asked for as far as they go, and the report says so.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Comparison:
    """With the plain step. A difference that is not a number is infinite."""

    identical: bool
    max_difference: float


class GradientCheck:
    """Of one model's step. The first call of `compare` notes what the others are compared with."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._reference: list[torch.Tensor | None] | None = None
        self.is_strict = True

    def compare(self, step: Callable[[], None]) -> Comparison:
        """Runs the step and leaves no gradient behind."""
        self._run(step)
        try:
            if self._reference is None:
                self._reference = [_on_cpu(parameter.grad) for parameter in self._model.parameters()]
            return self._compared(self._reference)
        finally:
            self._model.zero_grad(set_to_none=True)

    def _run(self, step: Callable[[], None]) -> None:
        if self.is_strict:
            try:
                with deterministic(strict=True):
                    step()
                return
            except RuntimeError as error:
                if "deterministic" not in str(error):
                    raise
                self.is_strict = False
                self._model.zero_grad(set_to_none=True)
        with deterministic(strict=False):
            step()

    def _compared(self, reference: list[torch.Tensor | None]) -> Comparison:
        identical, largest = True, 0.0
        for parameter, expected in zip(self._model.parameters(), reference, strict=True):
            found = parameter.grad
            if expected is None or found is None:
                identical = identical and expected is found
                continue
            expected = expected.to(found.device)
            if torch.equal(_bits(found), _bits(expected)):
                continue
            identical = False
            difference = float((found.double() - expected.double()).abs().max())
            largest = max(largest, difference if difference < float("inf") else float("inf"))
        return Comparison(identical, largest)


def _on_cpu(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().to("cpu", copy=True)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@contextlib.contextmanager
def deterministic(*, strict: bool) -> Iterator[None]:
    """As torch can; cuBLAS needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment from the start."""
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
