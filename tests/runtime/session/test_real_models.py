"""Networks as people train them: memory formats, mixed precision, dropout, checkpointing, frozen parts, adapters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.runtime.conftest import EITHER_WAY, OpenSession
from tests.runtime.rigs.lives import one_backward
from tests.runtime.rigs.networks import (
    UNet,
    images,
    perceptron,
    small_densenet,
    small_googlenet,
    small_resnet,
    small_vgg,
)
from tests.runtime.rigs.side_by_side import assert_nothing_alive, assert_same_as_plain
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.counters import Kept

pytestmark = EITHER_WAY

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet": small_resnet,
    "vgg": small_vgg,
    "densenet": small_densenet,
    "googlenet": small_googlenet,
    "u-net": UNet,
}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("precision", [nullcontext, autocast], ids=["float32", "autocast"])
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_network_trains_the_same_as_plain(
    session: Session, network: str, memory_format: str, precision: Callable[[], AbstractContextManager[object]]
) -> None:
    model = NETWORKS[network]().to(memory_format=FORMATS[memory_format])
    x = images(3).to(memory_format=FORMATS[memory_format])

    def step() -> torch.Tensor:
        with precision():
            loss = model(x).float().square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    assert_same_as_plain(session, step, model)


def test_five_steps_of_an_optimizer_end_in_the_same_weights(session: Session) -> None:
    model, batches = small_vgg(), [images(4) for _ in range(5)]
    targets = torch.tensor([0, 1, 2, 3])

    def step() -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            losses.append(nn.functional.cross_entropy(model(batch), targets))
            losses[-1].backward()
            optimizer.step()
        return [*losses, *(weight.detach().clone() for weight in model.parameters())]

    assert_same_as_plain(session, step, model)


@pytest.mark.parametrize("dropout", [nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_dropout_draws_the_same_numbers(session: Session, dropout: type[nn.Module]) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), dropout(0.3), nn.Tanh(), dropout(0.1)), torch.randn(4, 16)

    assert_same_as_plain(session, partial(one_backward, model, x), model)


def test_autocasts_of_weights_are_kept_or_cast_again(open_session: OpenSession) -> None:
    """The casts of two of the three weights are saved: the first Linear's input needs no gradient."""
    kept, cast_again = open_session("vdnn-all"), open_session("recompute-all")
    model, x = perceptron(depth=3), torch.randn(4, 16)
    for session in (kept, cast_again):
        with session:
            with autocast():  # the cache of autocast holds its casts until autocast ends
                loss = model(x).float().square().sum()
            loss.backward()
        del loss
        assert_nothing_alive(session)
    assert kept.counters.kept[Kept.PARAMETER_CAST] == 2, kept.report()
    assert cast_again.counters.kept[Kept.PARAMETER_CAST] == 0
    assert cast_again.counters.recomputes >= 2


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("precision", [nullcontext, autocast], ids=["float32", "autocast"])
def test_checkpointed_blocks_with_dropout(
    open_session: OpenSession, reentrant: bool, precision: Callable[[], AbstractContextManager[object]]
) -> None:
    session = open_session(offload_window="1KiB")
    blocks = nn.ModuleList(nn.Sequential(perceptron(depth=2), nn.Dropout(0.2)) for _ in range(3))
    head, x = nn.Linear(16, 4), torch.randn(4, 16, requires_grad=True)

    def step() -> torch.Tensor:
        with precision():
            hidden = x * 1.5
            for block in blocks:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            loss = head(hidden).float().square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    assert_same_as_plain(session, step, blocks, head, x)


def test_a_checkpointed_sequence_inside_a_network(session: Session) -> None:
    model, x = small_resnet(), images().requires_grad_()

    def step() -> torch.Tensor:
        loss = checkpoint_sequential(model[:5], 2, x * 2, use_reentrant=False)
        loss = model[5:](loss).square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    assert_same_as_plain(session, step, model, x)


def test_a_session_inside_a_checkpointed_block_sees_its_forward_and_its_recompute(session: Session) -> None:
    block, x = perceptron(depth=2), torch.randn(4, 16, requires_grad=True)

    def inner(hidden: torch.Tensor) -> torch.Tensor:
        with session:
            out: torch.Tensor = block(hidden)
            return out

    def step() -> torch.Tensor:
        loss = checkpoint(inner, x * 1.5, use_reentrant=False).square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    assert_same_as_plain(session, step, block, x)


def test_a_frozen_trunk_saves_nothing_that_its_head_does_not_need(session: Session) -> None:
    trunk, head, x = perceptron(depth=3).requires_grad_(False), nn.Linear(16, 4), torch.randn(4, 16)

    def step() -> torch.Tensor:
        loss: torch.Tensor = head(trunk(x)).square().sum()
        loss.backward()
        return loss

    assert_same_as_plain(session, step, trunk, head)
    assert session.counters.saves == 2 + session.counters.kept[Kept.PARAMETER]  # the head's input and output


class Adapted(nn.Module):
    """A frozen Linear with a trained low-rank addition, as in LoRA."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) + 2.0 * self.up(self.down(self.dropout(x)))
        return out


def test_low_rank_adapters_on_frozen_layers(session: Session) -> None:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (Adapted(nn.Linear(16, 16)), nn.GELU())))
    x = torch.randn(4, 16)

    assert_same_as_plain(session, partial(one_backward, model, x), model)
    # A frozen weight is still a parameter: it is saved for the gradient of the input, and kept.
    assert session.counters.kept[Kept.PARAMETER] >= 2 + 3 * 2 - 1


def test_one_batch_norm_in_evaluation_among_others_in_training(session: Session) -> None:
    model, x = small_resnet(), images()
    model[1].eval()

    assert_same_as_plain(session, partial(one_backward, model, x), model)
