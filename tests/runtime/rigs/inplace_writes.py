"""Tables of writes to a tensor that autograd saved, grouped by the response of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

Leave = Callable[[], None]

Write = Callable[[torch.Tensor], object]
Case = Callable[[Leave], list[torch.Tensor]]


def leaf() -> torch.Tensor:
    return torch.linspace(0.2, 1.4, 24).reshape(4, 6).requires_grad_()


def gradient(of: torch.Tensor, *to: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(of.sum(), to))


def square_written_to(write: Write) -> Case:
    """The square of a factor saves it; then the factor is written to."""

    def case(leave: Leave) -> list[torch.Tensor]:
        start = leaf()
        factor = start + 0
        square = factor * factor
        leave()
        write(factor)
        return gradient(square, start)

    return case


def assign(tensor: torch.Tensor, index: Any, value: Any) -> None:
    tensor[index] = value


no_grad = torch.no_grad()

# Writes to a saved tensor that autograd notices.
NOTICED_WRITES: dict[str, Write] = {
    "add_": lambda t: t.add_(1),
    "mul_ under no_grad": no_grad(lambda t: t.mul_(2)),
    "add_ in inference mode": torch.inference_mode()(lambda t: t.add_(1)),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(3),
    "copy_": lambda t: t.copy_(torch.ones(4, 6)),
    "copy_ of itself": no_grad(lambda t: t.copy_(t.clone())),
    "relu_": lambda t: t.relu_(),
    "clamp_": lambda t: t.clamp_(0.5, 0.9),
    "normal_": lambda t: t.normal_(),
    "lerp_": lambda t: t.lerp_(torch.ones(4, 6), 0.5),
    "addmm_": lambda t: t.addmm_(torch.ones(4, 2), torch.ones(2, 6)),
    "masked_fill_": lambda t: t.masked_fill_(torch.eye(4, 6, dtype=torch.bool), 0.0),
    "index_put_": lambda t: t.index_put_((torch.tensor([0, 2]),), torch.tensor(7.0)),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([0, 2]), torch.ones(2, 6)),
    "scatter_": lambda t: t.scatter_(0, torch.zeros(1, 6, dtype=torch.int64), 9.0),
    "dropout in place": lambda t: functional.dropout(t, 0.5, inplace=True),
    "assigning an element": lambda t: assign(t, (0, 0), 3.0),
    "assigning a slice": lambda t: assign(t, slice(1, 3), torch.zeros(2, 6)),
    "assigning through a mask": lambda t: assign(t, t > 1, 0.0),
    "adding to a slice": lambda t: t[:, 1:3].add_(1),
    "writing nothing to an empty slice": lambda t: t[:0].add_(1),
    "writing to a view of a view": lambda t: t[1:][0].mul_(2),
    "writing to the transpose": lambda t: t.t().mul_(2),
    "writing to an as_strided view": lambda t: t.as_strided((3,), (7,)).zero_(),
    "writing to the diagonal": lambda t: t.diagonal().fill_(0.5),
    "writing to detach()": lambda t: t.detach().add_(1),
    "writing to a view of detach()": lambda t: t.detach()[0].fill_(3),
    "writing to one of several chunks": no_grad(lambda t: t.split(2)[1].zero_()),
    "a foreach operation": no_grad(lambda t: torch._foreach_mul_([t], 2.0)),
    "a foreach operation on two views": no_grad(lambda t: torch._foreach_add_([t[0], t[1]], 1.0)),
    "an out= argument": no_grad(lambda t: torch.add(torch.ones(4, 6), 1, out=t)),
    "set_": no_grad(lambda t: t.set_(torch.ones(4, 6))),
    "resize_ of detach()": lambda t: t.detach().resize_(2, 6),
    "t_ of detach()": lambda t: t.detach().t_(),
}

# Writes that autograd does not notice: it computes gradients from the overwritten values.
UNNOTICED_WRITES: dict[str, Write] = {
    "zero_ through data": lambda t: t.data.zero_(),
    "copy_ through data": lambda t: t.data.copy_(torch.ones(4, 6)),
    "writing to a slice of data": lambda t: t.data[1:3].mul_(2),
    "writing to the data of a slice": lambda t: t[0].data.zero_(),
    "writing through numpy": lambda t: t.detach().numpy().fill(0),
    "writing through a tensor of the same memory": lambda t: torch.from_dlpack(t.detach()).data.add_(1),  # type: ignore[attr-defined]
}

# Writes that PyTorch refuses at once.
REFUSED_WRITES: dict[str, Write] = {
    "resize_": lambda t: t.resize_(2, 6),
    "writing to an expanded view": lambda t: t[:1].expand(3, 6).add_(1),
    "writing the wrong shape": lambda t: t.copy_(torch.ones(5)),
    "writing to a leaf": lambda t: leaf().add_(1),
    "writing to a view of a leaf": lambda t: leaf()[0].add_(1),
    "writing to one of unbind's views": lambda t: t.unbind()[0].add_(1),
}
