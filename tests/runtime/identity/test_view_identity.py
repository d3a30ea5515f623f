"""A reloaded save has its exact geometry, whatever view of its storage was saved."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from tests.runtime.identity.outcome import Outcome
from tests.runtime.identity.rig import NOTHING_TO_MOVE, identity_rigs
from tests.runtime.identity.runs import Mode, run_call

View = Callable[[torch.Tensor], torch.Tensor]

# Views of a tensor of 2 x 4 x 6 x 3 complex numbers.
VIEWS: dict[str, View] = {
    "whole": lambda t: t,
    "conjugate": lambda t: t.conj(),
    "conjugate transpose": lambda t: t[0, 0].mH,
    "negative": lambda t: t.conj().imag,
    "negative and strided": lambda t: t.conj().imag[:, ::2],
    "real part": lambda t: t.real,
    "imaginary part": lambda t: t.imag,
    "pairs of real numbers": torch.view_as_real,
    "transposed": lambda t: t.transpose(1, 3),
    "permuted": lambda t: t.permute(3, 1, 0, 2),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "slice with an offset": lambda t: t[1:, 1:3, 2:],
    "a small part": lambda t: t[1, 3, 5],
    "every second column": lambda t: t[..., ::2],
    "flipped": lambda t: t.flip(2),
    "expanded": lambda t: t[:, :1].expand(2, 5, 6, 3),
    "expanded from one element": lambda t: t[0, 0, 0, 0].expand(7, 7),
    "diagonal": lambda t: t.diagonal(0, 1, 2),
    "sliding windows": lambda t: t.unfold(2, 3, 1),
    "overlapping": lambda t: t.as_strided((5, 5), (3, 1), 4),
    "one element": lambda t: t[1, 2, 3, 1],
    "no element": lambda t: t[:, :0].clone(),
}


def squared(view: View, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Saves the view, and the storage once more through the tensor itself."""
    seen = view(tensor)
    return seen * seen, tensor * tensor


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_comes_back_as_it_was(view: View, mode: Mode, record_property: Callable[[str, object], None]) -> None:
    numbers = torch.linspace(-1, 1, 2 * 144)
    tensor = torch.complex(numbers[:144], numbers[144:]).reshape(2, 4, 6, 3).requires_grad_()

    def run() -> Outcome:
        return run_call(functools.partial(squared, view), ((tensor,), {}), mode)

    with identity_rigs(0, record_property) as rigs:
        for rig in rigs:
            rig.compare(mode.value, run, may_stay=None if mode is Mode.DOUBLE else NOTHING_TO_MOVE)
