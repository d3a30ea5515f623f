"""A tensor that was unpacked from a reload and is saved again (double backward) joins the storage that it came from."""

from __future__ import annotations

import pytest
import torch

import vdnn
from vdnn.runtime.machine.virtual_machine import VirtualMachine

SMALL = vdnn.Limits(offload_window="16KiB", reload_window="16KiB")


def penalized(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of a gradient penalty: the backward of tanh saves the result of tanh again."""
    hidden = x
    for weight in weights:
        hidden = (hidden @ weight).tanh()
    (gradient,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
    return list(torch.autograd.grad(gradient.square().sum(), weights))


def inputs(offset: int = 0, layers: int = 8) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(64 * 16 + offset, generator=generator)
    weights = [torch.randn(16, 16, generator=generator).requires_grad_() for _ in range(layers)]
    return base[offset:].view(64, 16).requires_grad_(), weights


@pytest.mark.parametrize("fake", [False, True])
def test_a_saved_reload_needs_no_second_copy(fake: bool) -> None:
    """Every storage is saved as often as with everything on the device."""
    shared, reloads = [], []
    for options in ({"limits": SMALL}, {}):
        with VirtualMachine("rtx-4090", fake=fake) as machine:
            x, weights = inputs()
            with vdnn.offload(policy="vdnn-all", device=machine, min_bytes=0, **options) as session:  # type: ignore[arg-type]
                penalized(x, weights)
            shared.append(session.counters.shared_saves)
            reloads.append(session.counters.reloads)
    assert reloads[0] > 8
    assert reloads[1] == 0
    assert shared[0] == shared[1]


@pytest.mark.parametrize("offset", [0, 3])
def test_gradients_through_saved_reloads_are_the_same_bits(offset: int) -> None:
    with VirtualMachine("rtx-4090", fake=False) as machine:
        plain = penalized(*inputs(offset))
        with vdnn.offload(policy="vdnn-all", device=machine, min_bytes=0, limits=SMALL) as session:
            ours = penalized(*inputs(offset))
        assert session.counters.reloads > 8
        assert all(map(torch.equal, ours, plain))


def test_a_write_to_what_was_unpacked_is_not_taken_for_the_saved_bytes() -> None:
    with VirtualMachine("rtx-4090", fake=False) as machine:
        x, weights = inputs()
        with vdnn.offload(policy="vdnn-all", device=machine, min_bytes=0, limits=SMALL) as session:
            first = (x @ weights[0]).tanh()
            node, expected, hidden = first.grad_fn, first.detach().clone(), first
            del first
            for weight in weights[1:]:
                hidden = (hidden @ weight).tanh()
            reloads = session.counters.reloads
            unpacked = node._saved_result  # type: ignore[union-attr]
            assert session.counters.reloads > reloads
            unpacked.detach().add_(1)
            (gradient,) = torch.autograd.grad((unpacked.detach() * x).sum(), x)
        assert torch.equal(gradient, expected + 1)
