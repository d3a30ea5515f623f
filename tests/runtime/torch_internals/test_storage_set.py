"""The storage set recognizes parameters by storage, keeps no storage alive, and does not grow without bound."""

from __future__ import annotations

import torch

from vdnn.runtime.torch_internals.storage_set import StorageSet


def test_a_storage_is_recognised_through_any_view() -> None:
    known, weight = StorageSet(), torch.randn(4, 4)
    known.add(weight.untyped_storage())
    known.add(weight.t().untyped_storage())
    assert weight[1:].untyped_storage() in known
    assert torch.randn(4, 4).untyped_storage() not in known
    assert len(known) == 1
    assert known.nbytes() == weight.nbytes


def test_storages_that_are_gone_are_forgotten_while_new_ones_come() -> None:
    """FSDP gives a parameter a new storage at every call. A set that was only pruned at the end of a session grew with
    every step."""
    known = StorageSet()
    living = [torch.empty(8) for _ in range(50)]
    for tensor in living:
        known.add(tensor.untyped_storage())
    for _ in range(10_000):
        known.add(torch.empty(8).untyped_storage())
    assert len(known) <= 2 * 64
    assert all(tensor.untyped_storage() in known for tensor in living)
    assert known.nbytes() == sum(tensor.nbytes for tensor in living)
