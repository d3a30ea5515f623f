"""Every model of benchmarks.models, as functions of a batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import models


def zoo() -> dict[str, Callable[[int], Any]]:
    """All models by name, the long ones too: a forward pass without data is short."""
    names = (name for name in models.__all__ if name.islower())
    return {name: _parts_of(getattr(models, name)) for name in names if name != "vdnn_networks"}


def _parts_of(make: Callable[[int], Any]) -> Callable[[int], Any]:
    def build(batch: int) -> Any:
        workload = make(batch)
        return workload.model, workload.inputs, workload.loss

    return build
