"""Writes that no version counter shows, to bytes that nobody had saved.

A program may save a part of a storage, write into the rest of it through `.data`, and save a larger part: solvers of
differential equations collect the stages of a step so. Plain PyTorch is right about that, because the bytes that it
saved first did not change. A copy of the whole storage that is made at the first save misses later writes. So the
larger part is managed on its own, as if it were another version, if the copy was made already and a custom Function is
among what made the view: none of torch's own operations writes so. Writes of the program itself into a tensor without a
history are not found: they look like slices of an input.
"""

from __future__ import annotations

import torch

from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.table import reach_of

# How far above a view its maker is looked for: past slices and reshapes.
_FAR = 6


def joins_unseen_writes(managed: ManagedStorage, saved: tuple[int, int], part: torch.Tensor, begin: int) -> bool:
    """True if a view may not join this managed storage, because its bytes may have been written since the range `saved`
    was saved. Otherwise its bytes count as saved from now on. `begin`: where the managed bytes begin in its storage."""
    first, end = saved
    reach = tuple(byte - begin + managed.facts.begin for byte in reach_of(part))
    if first <= reach[0] and reach[1] <= end:
        return False
    if (managed.copy is not None or managed.discarded is not None) and _is_of_a_function(part):
        return True
    managed.saved_bytes = min(first, reach[0]), max(end, reach[1])
    return False


def _is_of_a_function(view: torch.Tensor) -> bool:
    node = view.grad_fn
    if node is None:
        return False
    for _ in range(_FAR):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        parents = node.next_functions
        if not parents or parents[0][0] is None:
            return False
        node = parents[0][0]
    return False
