"""Views of the grammar. Their results may have any shape that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tests.fuzz.grammar import operation
from tests.fuzz.shapes import fitted

if TYPE_CHECKING:
    from tests.fuzz.world import World

Tensor = torch.Tensor


def _chunks(x: Tensor) -> Tensor:
    left, right = x.chunk(2, 1)
    return left * right


def _unbound(x: Tensor) -> Tensor:
    first, *_, last = x.unbind(0)
    return first.sigmoid() * last


def _split(x: Tensor) -> Tensor:
    pieces = x.split([2, 4, 2], 1)
    return pieces[1] + torch.cat([pieces[0], pieces[2]], 1).tanh()


_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.reshape(8, 4),
    "transpose": lambda x: x.t(),
    "select": lambda x: x[1],
    "slice": lambda x: x[1:3],
    "strided": lambda x: x[:, ::2],
    "chunk": _chunks,
    "unbind": _unbound,
    "split": _split,
    "expand": lambda x: x[:1].expand(4, 8),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "permute": lambda x: x.reshape(2, 2, 8).permute(2, 0, 1),
    "narrow": lambda x: x.narrow(1, 2, 4),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 1),
    "cat": lambda x: torch.cat([x[2:], x[:2]]),
    "stack": lambda x: torch.stack([x[0], x[3]]),
    "diagonal": lambda x: x[:, :4].diagonal(),
    "as_strided": lambda x: x.contiguous().as_strided((4, 4), (8, 2)),
    "contiguous": lambda x: x.t().contiguous(),
    "double": lambda x: x.double().tanh().float(),
    "detached": lambda x: x * x.detach(),
    "data": lambda x: x * x.data,
    "tril": lambda x: x.tril(),
}


@operation("view", weight=4, draw=lambda random: (random.choice(sorted(_VIEWS)),))
def _view(world: World, name: str) -> Callable[[Tensor], Tensor]:
    apply = _VIEWS[name]

    def run(x: Tensor) -> Tensor:
        x = fitted(x)
        if name == "data":  # a save of x.data does not see a write to x: see writes._write_value
            world.held.append(x)
        return apply(x)

    return run
