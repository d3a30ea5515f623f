"""Saves whose memory belongs to others than torch, such as an array of numpy: a release frees nothing, and what the
owner reads afterwards are its own values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import nn

from tests.runtime.unusual.every_mode import MODES, Step, assert_same_in
from tests.runtime.unusual.small_networks import steps_on

VIEWS: dict[str, Callable[[np.ndarray], torch.Tensor]] = {
    "from_numpy": torch.from_numpy,
    "dlpack": torch.utils.dlpack.from_dlpack,
    "part": lambda array: torch.from_numpy(array)[:-1],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("mode", MODES)
def test_the_owner_of_saved_memory_finds_its_own_values_in_every_step(mode: str, view: str) -> None:
    def reading() -> Step:
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
        inputs = torch.randn(24, 16).numpy()
        step = steps_on(lambda _: model(VIEWS[view](inputs)).square().mean(), model, lr=0.1)

        def reads(index: int) -> Iterable[torch.Tensor | None]:
            return [*step(index), torch.from_numpy(inputs.copy())]

        return reads

    assert_same_in(mode, reading, steps=10)
