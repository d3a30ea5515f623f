"""torch.utils.checkpoint of both kinds, and selective, inside a session: gradients are those of plain torch.

The backward pass recomputes the saves of a checkpointed block, so they are never offloaded; the block's inputs are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import vdnn
from tests.integrations.parallel_training import BATCH, WIDTH, Block, blocks
from tests.runtime.conftest import EITHER_WAY, OpenSession
from tests.runtime.rigs.side_by_side import assert_same_as_plain, differences, outcome
from vdnn.runtime.session.session import Session

pytestmark = EITHER_WAY

BLOCKS = 4


def must_save_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saves = operation is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> Any:
    return create_selective_checkpoint_contexts(must_save_products)


def reentrant(block: nn.Module, hidden: torch.Tensor) -> Any:
    return checkpoint(block, hidden, use_reentrant=True)


def non_reentrant(block: nn.Module, hidden: torch.Tensor) -> Any:
    return checkpoint(block, hidden, use_reentrant=False)


def choosing(block: nn.Module, hidden: torch.Tensor) -> Any:
    return checkpoint(block, hidden, use_reentrant=False, context_fn=selective)


def nested(block: nn.Module, hidden: torch.Tensor) -> Any:
    return checkpoint(lambda x: checkpoint(block, x.sin(), use_reentrant=False), hidden, use_reentrant=False)


KINDS = [reentrant, non_reentrant, choosing, nested]


def make_step(kind: Callable[[nn.Module, torch.Tensor], Any], model: nn.Module) -> Callable[[], torch.Tensor]:
    x = torch.randn(BATCH, WIDTH)

    def step() -> torch.Tensor:
        hidden = model[0](x)  # type: ignore[index]
        for block in model[1:]:  # type: ignore[index]
            hidden = kind(block, hidden)
        loss: torch.Tensor = hidden.square().mean()
        loss.backward()
        return loss

    return step


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpointed_step_is_the_same_as_plain(session: Session, kind: Callable[..., Any]) -> None:
    model = blocks(BLOCKS)
    assert_same_as_plain(session, make_step(kind, model), model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpointed_step_under_a_plan_is_the_same_as_plain(kind: Callable[..., Any]) -> None:
    model = blocks(BLOCKS)
    step = make_step(kind, model)
    with vdnn.VirtualMachine("titan-x", fake=False) as machine:
        plain = outcome(step, [model])
        with vdnn.offload("prefix-cut", budget="min", device=machine, min_bytes=0) as session:
            for _ in range(4):
                ours = outcome(step, [model])
                session.step()
                assert not differences(plain, ours)
    assert session.plan is not None
    assert session.plan.offloaded_bytes, session.report()
    session.close()


def test_a_sequence_checkpointed_in_segments_is_the_same_as_plain(session: Session) -> None:
    model, x = blocks(BLOCKS), torch.randn(BATCH, WIDTH)

    def step() -> torch.Tensor:
        loss: torch.Tensor = checkpoint_sequential(model, 2, x, use_reentrant=False).square().mean()
        loss.backward()
        return loss

    assert_same_as_plain(session, step, model)


@pytest.mark.parametrize("kind", [non_reentrant, choosing])
def test_the_input_of_a_checkpointed_block_leaves_and_nothing_else_of_it(
    open_session: OpenSession, kind: Callable[..., Any]
) -> None:
    """Torch keeps the tensors that a selective checkpoint saves outside of the hooks, so they are not offloaded
    either."""
    session = open_session("vdnn-all", offload_window=1)
    block, weight = Block(), torch.ones((), requires_grad=True)
    with session:
        hidden = torch.randn(BATCH, WIDTH) * weight  # saves the random numbers: as many bytes again
        loss = kind(block, hidden).sum()
        del hidden
        torch.ones(()).mul(torch.ones((), requires_grad=True))  # issues copies that waited for their operation
        assert session.counters.storage_bytes == 2 * BATCH * WIDTH * 4, session.report()
    loss.backward()


@pytest.mark.skipif(
    "respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters,
    reason="this torch's checkpoint does not show hooks what a selective one saves (pytorch#190581)",
)
@pytest.mark.parametrize("shown", [True, False])
def test_a_selective_checkpoint_that_shows_hooks_what_it_saves_is_the_same(session: Session, shown: bool) -> None:
    model = blocks(BLOCKS)

    def kind(block: nn.Module, hidden: torch.Tensor) -> Any:
        return checkpoint(block, hidden, use_reentrant=False, context_fn=selective, respect_saved_tensors_hooks=shown)

    assert_same_as_plain(session, make_step(kind, model), model)
