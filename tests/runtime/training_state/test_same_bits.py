"""With its state on the host, every optimizer computes the bits of plain PyTorch, in every loop and on every device.

Compared are all losses, norms, parameters, tensors of the state and options of groups, after 20 steps. Muon has no
fused form and takes matrices only; SGD without momentum has no state, and shows that this is no special case.
"""

from __future__ import annotations

import pytest

from tests.runtime.training_state.conftest import Manage
from tests.runtime.training_state.loops import LOOPS, OPTIMIZERS, same, train


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_has_the_bits_of_plain_pytorch(optimizer: str, loop: str, manage: Manage) -> None:
    make, train_in = OPTIMIZERS[optimizer], LOOPS[loop]
    expected = train(make, train_in)
    assert same(expected, train(make, train_in, manage))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tied_weights_have_the_bits_of_plain_pytorch(optimizer: str, manage: Manage) -> None:
    make = OPTIMIZERS[optimizer]
    assert same(train(make, LOOPS["plain"], tied=True), train(make, LOOPS["plain"], manage, tied=True))


def test_the_comparison_finds_a_difference() -> None:
    make = OPTIMIZERS["adamw"]
    expected = train(make, LOOPS["plain"])
    assert not same(expected, train(make, LOOPS["clipped_by_value"]))
    other = train(make, LOOPS["plain"])
    other[-3][0]["exp_avg"].view(-1)[0] += 1e-6
    assert not same(expected, other)
