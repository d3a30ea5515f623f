"""Steps with writes that are harmless, or that autograd does not notice: plain PyTorch computes gradients.

`leave` is described in inplace_modified.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.runtime.rigs.inplace_writes import Case, Leave, gradient, leaf, square_written_to


def written_before_it_is_saved(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    factor = start + 0
    leave()
    factor.add_(1)
    square = factor * factor
    leave()
    return gradient(square, start)


def written_but_never_saved(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    term = start.exp() + 1
    doubled = term + term
    leave()
    term.zero_()
    return gradient(doubled, start)


def written_after_its_backward(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    factor = start + 0
    square = factor * factor
    leave()
    first = gradient(square, start)
    factor.zero_()
    return [*first, factor]


def clone_is_written(leave: Leave) -> list[torch.Tensor]:
    return square_written_to(lambda t: t.clone().zero_())(leave)


def saved_result_is_the_written_tensor(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    result = (start + 0).sigmoid_()
    leave()
    return gradient(result.relu(), start)


def in_place_activations_are_chained(leave: Leave) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        torch.nn.ReLU(inplace=True),
        torch.nn.Linear(8, 4),
        torch.nn.SiLU(),
        torch.nn.Linear(4, 1),
    )
    start = leaf()
    result = model(start + 0)
    leave()
    return gradient(result, start, *model.parameters())


def only_the_second_of_two_saved_versions_is_used(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    factor = start + 0
    before = factor * factor
    leave()
    with torch.no_grad():
        factor.add_(1)
    after = factor * factor
    leave()
    del before
    return gradient(after, start)


def rows_of_a_buffer_are_assigned_one_by_one(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    buffer = torch.zeros(4, 6)
    for index, row in enumerate(start + 0):
        buffer[index] = row * row
        leave()
    return gradient(buffer.exp(), start)


def accumulator_is_added_to(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    total = torch.zeros(6)
    for row in start + 0:
        total += row.tanh()
        leave()
    return gradient(total, start)


def unsafe_chunks_have_versions_of_their_own(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    first, second = (start + 0).unsafe_chunk(2)
    square = first * first
    leave()
    with torch.no_grad():
        second.mul_(2)
    product = second * second
    leave()
    del first, second
    return gradient(square + product, start)


def optimizer_steps_after_each_backward(leave: Leave) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 6) + 0).sum()
        leave()
        loss.backward()
        optimizer.step()
    return list(model.parameters())


def batch_norm_updates_its_buffers_twice_before_backward(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    norm = torch.nn.BatchNorm1d(6)
    total = norm(start + 0)
    leave()
    total = total * norm(start * 2)
    leave()
    return [*gradient(total.square(), start, *norm.parameters()), *norm.buffers()]


def dropout_in_place(leave: Leave) -> list[torch.Tensor]:
    torch.manual_seed(0)
    start = leaf()
    dropped = functional.dropout(start * 2, 0.5, inplace=True)
    leave()
    return gradient(dropped.square(), start)


def noise_is_filled_in_after_it_was_saved(leave: Leave) -> list[torch.Tensor]:
    torch.manual_seed(0)
    start = leaf()
    leaky = functional.rrelu((start - 0.7), training=True)
    leave()
    return gradient(leaky, start)


def foreach_operation_before_the_save(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    factors = [start + 0, start + 1]
    torch._foreach_mul_(factors, 2.0)
    product = factors[0] * factors[1]
    leave()
    return gradient(product, start)


def another_version_is_saved_of_what_data_wrote(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    factor = start + 0
    square = factor * factor
    leave()
    other = factor.data.add_(1)
    product = start * other
    leave()
    return gradient(square + product, start)


def leaf_is_swapped_through_data(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    square = start * start
    leave()
    start.data = torch.ones(4, 6)
    return gradient(square, start)


def metadata_of_a_view_changes(leave: Leave) -> list[torch.Tensor]:
    start = leaf()
    factor = start + 0
    square = factor * factor
    leave()
    factor.view(-1).unsqueeze(0).squeeze()
    factor.requires_grad_()
    return gradient(square, start)


HARMLESS_CASES: list[Case] = [
    written_before_it_is_saved,
    written_but_never_saved,
    written_after_its_backward,
    clone_is_written,
    saved_result_is_the_written_tensor,
    in_place_activations_are_chained,
    only_the_second_of_two_saved_versions_is_used,
    rows_of_a_buffer_are_assigned_one_by_one,
    accumulator_is_added_to,
    unsafe_chunks_have_versions_of_their_own,
    optimizer_steps_after_each_backward,
    batch_norm_updates_its_buffers_twice_before_backward,
    dropout_in_place,
    noise_is_filled_in_after_it_was_saved,
    foreach_operation_before_the_save,
    another_version_is_saved_of_what_data_wrote,
    leaf_is_swapped_through_data,
    metadata_of_a_view_changes,
]
