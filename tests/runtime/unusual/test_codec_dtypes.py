"""A storage whose views are saved in several dtypes is decoded with every byte unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.unusual.every_mode import MODES, Step, assert_same_in
from tests.runtime.unusual.small_networks import steps_on
from vdnn.runtime.machine.virtual_machine import VirtualMachine

Tensor = torch.Tensor


class Flagged(torch.autograd.Function):
    """Saves one storage of flags as each of `dtypes`, in that order, and reads all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flags: Tensor, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        ctx.save_for_backward(*(flags.view(dtype) for dtype in dtypes))
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0]
        for saved in ctx.saved_tensors:
            numbers = torch.where(saved, 1.0, 0.0) if saved.dtype is torch.bool else saved.view(torch.uint8).float()
            grad = grad * numbers.reshape(-1)[: grad.numel()].view_as(grad)
        return grad, None, None


def program(dtypes: tuple[torch.dtype, ...], *, apart: bool, codes: int = 200) -> Callable[[], Step]:
    """With `apart`, a separate function saves each dtype, with operations in between."""

    def factory() -> Step:
        first, last = nn.Linear(16, 64), nn.Linear(64, 4)

        def loss_of(index: int) -> Tensor:
            # By coincidence, single bits can hold the flags of the first steps.
            flags = torch.randint(0, 2 if index < 3 else codes, (16, 64), dtype=torch.uint8)
            hidden = first(torch.randn(16, 16)).tanh()
            for group in [(dtype,) for dtype in dtypes] if apart else [dtypes]:
                hidden = Flagged.apply(hidden, flags, group).sin()
            return last(hidden).square().mean()  # type: ignore[no-any-return]

        return steps_on(loss_of, first, last, is_seeded=True, steps=False)

    return factory


BOTH_WAYS = [(torch.bool, torch.uint8), (torch.uint8, torch.bool), (torch.bool, torch.int8, torch.int32), (torch.bool,)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("dtypes", BOTH_WAYS, ids=str)
def test_flags_come_back_as_they_were(dtypes: tuple[torch.dtype, ...], mode: str, *, apart: bool) -> None:
    assert_same_in(mode, program(dtypes, apart=apart))


def test_a_lossy_codec_is_not_asked_of_a_storage_that_is_read_as_integers() -> None:
    """Within its bound, bf16 would turn them into other integers."""

    class Bits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.view(torch.int32))
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * (ctx.saved_tensors[0] % 1024)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    x = torch.randn(256, 64)

    def gradient() -> Tensor | None:
        model.zero_grad()
        hidden = model[1](model[0](x).sin())
        model[2](Bits.apply(hidden) + hidden.exp()).square().mean().backward()
        return model[2].weight.grad

    plain = gradient()
    assert plain is not None
    with VirtualMachine("titan-x", fake=False) as machine:
        session = vdnn.offload(budget="min", device=machine, min_bytes=0, lossy="bf16")
        with session:
            for _ in range(5):
                found = gradient()
                session.step()
    assert found is not None
    # bf16 may change floating-point values by 1/256. If it changed the bits of integers, the error would be larger.
    assert (found - plain).abs().max() <= plain.abs().max() / 64
