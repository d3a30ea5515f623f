"""Steps that write to something that the backward still needs: plain PyTorch raises in backward.

A step calls `leave` at the points where a session is to copy what was saved and to release the sources. In a plain run
`leave` does nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.runtime.rigs.inplace_writes import Case, Leave, gradient, leaf


def result_is_overwritten(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    result = start.exp()
    leave()
    scaled = result.mul_(2)
    return gradient(scaled, start)


def relu_result_is_overwritten(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    result = torch.relu(start - 0.5)
    leave()
    result += 1
    return gradient(result, start)


def base_of_a_saved_view_is_written(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    base = start + 0
    rows = base[1:3]
    square = rows * rows
    leave()
    base.mul_(2)
    return gradient(square, start)


def sibling_view_of_a_saved_view_is_written(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    base = start + 0
    square = base[:2] * base[:2]
    leave()
    base[2:].zero_()
    return gradient(square, start)


def leaf_is_written_under_no_grad(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    square = start * start
    leave()
    with torch.no_grad():
        start.add_(1)
    return gradient(square, start)


def input_without_grad_is_written(leave: Leave) -> list[torch.Tensor]:
    weight, batch = leaf(), torch.ones(4, 6)
    product = weight * batch
    leave()
    batch.zero_()
    return gradient(product, weight)


def index_is_written(leave: Leave) -> list[torch.Tensor]:
    start, index = leaf(), torch.tensor([0, 2, 2])
    rows = (start + 0).index_select(0, index)
    leave()
    index.zero_()
    return gradient(rows, start)


def mask_is_written(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    mask = start.detach() > 0.7
    filled = (start + 0).masked_fill(mask, 0.0)
    leave()
    mask.logical_not_()
    return gradient(filled, start)


def first_of_two_saved_versions_is_used(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    factor = start + 0
    before = factor * factor
    leave()
    factor.add_(1)
    after = factor * factor
    leave()
    return gradient(before + after, start)


def written_between_two_backwards(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    factor = start + 0
    square = (factor * factor).sum()
    leave()
    torch.autograd.grad(square, start, retain_graph=True)
    factor.add_(1)
    return gradient(square, start)


def written_before_a_double_backward(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    factor = start + 0
    (first,) = torch.autograd.grad((factor * factor * factor).sum(), start, create_graph=True)
    leave()
    factor.add_(1)
    return gradient(first, start)


def written_after_a_custom_function_saved_it(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    factor = start + 0
    doubled = _Scaled.apply(factor)
    leave()
    factor.add_(1)
    return gradient(doubled, start)


def saved_part_is_written_before_the_whole_is_saved(leave: Leave) -> list[torch.Tensor]:
    """A custom Function saves a part. The square saves the whole, which contains the part, at a later version."""
    start = leaf()
    whole = start.repeat(64, 1)
    scaled: torch.Tensor = _Scaled.apply(whole[1:3])
    leave()
    whole.mul_(2)
    square = whole * whole
    leave()
    return [*gradient(scaled, start), *gradient(square, start)]


def optimizer_steps_between_forward_and_backward(leave: Leave, foreach: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    model(torch.ones(4, 6)).sum().backward()
    loss = model(torch.ones(4, 6)).sum()
    leave()
    optimizer.step()
    return gradient(loss, *model.parameters())


def foreach_optimizer_steps_between_forward_and_backward(leave: Leave) -> list[torch.Tensor]:
    return optimizer_steps_between_forward_and_backward(leave, foreach=True)


def batch_norm_in_evaluation_is_trained_before_its_backward(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    norm = torch.nn.BatchNorm1d(6).eval()
    normed = norm(start + 0)
    leave()
    norm.running_var.mul_(2)  # type: ignore[union-attr]
    return gradient(normed, start)


def hidden_state_of_a_loop_is_written(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    state, total = torch.zeros(6), torch.zeros(())
    for row in start:
        state += row
        total = total + (state * state).sum()
        leave()
    return gradient(total, start)


def complex_conjugate_view_is_written(leave: Leave) -> list[torch.Tensor]:
    start = torch.complex(leaf().detach(), leaf().detach()).requires_grad_()
    conjugate = (start + 0).conj()
    square = conjugate * conjugate
    leave()
    conjugate.mul_(2)
    return gradient(square.real, start)


MODIFIED_CASES: list[Case] = [
    result_is_overwritten,
    relu_result_is_overwritten,
    base_of_a_saved_view_is_written,
    sibling_view_of_a_saved_view_is_written,
    leaf_is_written_under_no_grad,
    input_without_grad_is_written,
    index_is_written,
    mask_is_written,
    first_of_two_saved_versions_is_used,
    written_between_two_backwards,
    written_before_a_double_backward,
    written_after_a_custom_function_saved_it,
    saved_part_is_written_before_the_whole_is_saved,
    optimizer_steps_between_forward_and_backward,
    foreach_optimizer_steps_between_forward_and_backward,
    batch_norm_in_evaluation_is_trained_before_its_backward,
    hidden_state_of_a_loop_is_written,
    complex_conjugate_view_is_written,
]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return factor * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (factor,) = ctx.saved_tensors
        return gradient * 2 * factor
