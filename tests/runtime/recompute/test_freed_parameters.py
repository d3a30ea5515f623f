"""Parameters whose memory is freed between their uses, as by FSDP2: no recipe reads them meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

import vdnn
from tests.runtime.conftest import OpenSession
from vdnn.runtime.machine.virtual_machine import VirtualMachine


class Freed(nn.Module):
    """Frees the parameters of a block after its forward, and brings them back as its backward begins."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.LayerNorm(16), nn.Linear(16, 32, bias=bias), nn.GELU(), nn.Linear(32, 16, bias=bias)
        )
        self.values: dict[Tensor, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.bring()
        out: Tensor = x + self.block(x)
        if out.requires_grad:
            out.register_hook(self.bring)
        self.free()
        return out

    def free(self) -> None:
        for one in self.block.parameters():
            self.values[one] = one.detach().clone()
            with _unsafe_preserve_version_counter(one):
                one.untyped_storage().resize_(0)

    def bring(self, _: Tensor | None = None) -> None:
        for one, value in self.values.items():
            with torch.no_grad(), _unsafe_preserve_version_counter(one):
                one.untyped_storage().resize_(value.nbytes)
                one.copy_(value)
        self.values.clear()


def gradients(*, bias: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model, found = nn.Sequential(*[Freed(bias=bias) for _ in range(3)]), list[Tensor]()
    for _ in range(3):
        x = torch.randn(4, 16, requires_grad=True)
        model(x).square().mean().backward()
        found += [one.grad.clone() for one in (x, *model.parameters()) if one.grad is not None]
    return found


@pytest.mark.filterwarnings("ignore:cannot recompute")
@pytest.mark.parametrize("bias", [True, False])  # found in the graph, and none: then the weight is a save
@pytest.mark.parametrize("policy", ["vdnn-all", "recompute-all"])
def test_a_freed_parameter_is_not_read(policy: str, open_session: OpenSession, *, bias: bool) -> None:
    expected = gradients(bias=bias)
    with open_session(policy, min_bytes=0):
        assert all(map(torch.equal, expected, gradients(bias=bias)))


@pytest.mark.filterwarnings("ignore::vdnn.VdnnWarning")
@pytest.mark.parametrize("bias", [True, False])
def test_a_plan_reads_no_freed_parameter(*, bias: bool) -> None:
    expected = gradients(bias=bias)
    with VirtualMachine("rtx-4090", fake=False) as machine, vdnn.offload(budget="min", device=machine, min_bytes=0):
        assert all(map(torch.equal, expected, gradients(bias=bias)))
