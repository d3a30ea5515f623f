"""Workloads in mixed precision, as transformers are trained: the model and its loss under autocast to bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.workload import Workload


class UnderAutocast(nn.Module):
    """Calls a model under autocast. Its parameters stay in float32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return self.inner(*inputs)


def mixed(make: Callable[[int], Workload]) -> Callable[[int], Workload]:
    """A maker of the same workload in mixed precision, for a card or a rehearsal."""

    def made(batch: int) -> Workload:
        workload = make(batch)

        def loss(output: Any) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return workload.loss(output)

        return workload._replace(model=UnderAutocast(workload.model), loss=loss)

    return made
