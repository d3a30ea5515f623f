"""Every life of a graph has the numbers of plain PyTorch; graphs that outlive their session, or die amid copies."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.runtime.conftest import EITHER_WAY, OpenSession
from tests.runtime.rigs.lives import LIVES, one_backward
from tests.runtime.rigs.networks import images, small_resnet
from tests.runtime.rigs.side_by_side import (
    assert_nothing_alive,
    assert_same_as_plain,
    same_bits,
)
from vdnn.runtime.session.session import Session

pytestmark = EITHER_WAY


@pytest.mark.parametrize("life", LIVES)
def test_a_life_is_the_same_as_plain(life: str, session: Session) -> None:
    step, make_models, make_input = LIVES[life]
    models, x = [make() for make in make_models], make_input()
    assert_same_as_plain(session, partial(step, *models, x), *models)


def test_a_graph_goes_backward_five_times_after_the_session_was_left(session: Session) -> None:
    model, x = small_resnet(), images()

    def gradients(loss: torch.Tensor) -> list[torch.Tensor | None]:
        for _ in range(5):
            loss.backward(retain_graph=True)
        return [None if weight.grad is None else weight.grad.clone() for weight in model.parameters()]

    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain = gradients(model(x).square().sum())
    model.zero_grad()
    model.load_state_dict(state)
    with session:
        loss = model(x).square().sum()
    assert all(map(same_bits, plain, gradients(loss)))
    del loss
    assert_nothing_alive(session)


@pytest.mark.parametrize("blocks", [0, 2, 4, 5, 8])
def test_a_graph_dropped_amid_its_copies_takes_them_with_it(open_session: OpenSession, blocks: int) -> None:
    session = open_session(offload_window="1MiB", reload_window="1MiB")
    model, x = small_resnet(), images(4)
    with session:
        hidden = model[:blocks](x)
        loss = model[blocks:](hidden).square().sum()
        if hidden.requires_grad:
            # Some saves from before `hidden` are being reloaded when the backward stops.
            hidden.register_hook(_stop)
            with pytest.raises(RuntimeError, match="enough"):
                loss.backward()
        del hidden, loss
    assert_nothing_alive(session)
    model.zero_grad()
    assert_same_as_plain(session, partial(one_backward, model, x), model)


def _stop(gradient: torch.Tensor) -> None:
    raise RuntimeError("enough")
