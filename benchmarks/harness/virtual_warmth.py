"""Imports modules and fills caches before cells are forked, which saves seconds in each cell.

It runs one small checkpointed step without data on a machine of its own. It makes no tensor with data, so that no
library starts threads, and a fork is safe. A build of torch for a GPU starts autograd's threads at the first backward
pass, and refuses one in a fork after that, GPU or not: there only the modules are imported.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import vdnn
from vdnn.runtime.rehearsal.cuda_shaped import CudaShaped


def warm_up() -> None:
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return
    with vdnn.VirtualMachine("h100") as machine, CudaShaped():
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        x = torch.empty(1024, 3, 32, 32)
        with vdnn.offload("auto", budget="min", device=machine, measure=True) as session:
            for _ in range(3):
                made: torch.Tensor = checkpoint(model, x, use_reentrant=False)
                made.sum().backward()  # type: ignore[no-untyped-call]
                model.zero_grad(set_to_none=True)
                session.step()
        session.close()
