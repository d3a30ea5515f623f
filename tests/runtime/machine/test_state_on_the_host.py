"""State that a session keeps on the host is no memory of the virtual machine, whatever a program does with it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import vdnn

LOOKS: dict[str, Callable[[torch.optim.Optimizer, list[torch.Tensor]], object]] = {
    "detach": lambda _, state: [one.detach() for one in state],
    "view": lambda _, state: [one.view(-1) for one in state],
    "copy": lambda _, state: [one.detach().cpu().clone() for one in state],
    "state_dict": lambda optimizer, _: copy.deepcopy(optimizer.state_dict()),
}


CASES = [(look, fake) for look in LOOKS for fake in (False, True)]
CASES.remove(("state_dict", True))  # torch does not copy deeply what has no data


@pytest.mark.parametrize(("look", "fake"), CASES)
def test_a_look_at_the_state_leaves_the_count_of_memory_as_it_was(look: str, fake: bool) -> None:
    with vdnn.VirtualMachine("rtx-4090", fake=fake) as machine:
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        with vdnn.offload("keep", device=machine, min_bytes=0, optimizer=optimizer):
            for _ in range(2):
                model(torch.randn(4, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            before = machine.allocated_bytes
            LOOKS[look](optimizer, [one for state in optimizer.state.values() for one in state.values() if one.dim()])
            assert machine.allocated_bytes == before
