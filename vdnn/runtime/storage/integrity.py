"""Hashes of storages, taken on the device before and after: for integrity mode and for rechecks of recomputes.

The comparison runs on the device, and the host reads its result at the end of the step: the training loop waits for it
once in each step. In integrity mode every reloaded storage is compared with the bytes that were offloaded; a difference
raises an error that names the first storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.utils._mode_utils import no_dispatch

from vdnn import _C
from vdnn.errors import IntegrityError
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.tensor_kinds import outside_of_transforms

Tag = TypeVar("Tag")


@dataclass(frozen=True, slots=True)
class _Pair(Generic[Tag]):
    tag: Tag
    before: torch.Tensor
    after: torch.Tensor


class HashPairs(Generic[Tag]):
    """The hashes of one transport's storages, before and after. The tag of each pair says which storage it is."""

    def __init__(self, transport: Transport) -> None:
        self._device = transport.device
        self._torch_device = transport.torch_device
        self._pairs: list[_Pair[Tag]] = []
        self.compared = 0  # number of storages since the session was made
        self.failed = 0

    def hash(self, address: int, nbytes: int, stream: _C.Stream) -> torch.Tensor:
        """Hashes `nbytes` at `address`: a tensor of one integer on the device, ordered on `stream`."""
        with outside_of_transforms(), no_dispatch():  # the latter keeps it out of a virtual machine's memory count
            result = torch.empty(1, dtype=torch.int64, device=self._torch_device)
        call = _C.KernelCall(_C.Kernel.CONTENT_HASH, address, result.data_ptr(), nbytes)
        self._device.launch(call, stream)
        return result

    def compare(self, tag: Tag, before: torch.Tensor, address: int, nbytes: int, stream: _C.Stream) -> None:
        """Hashes the bytes at `address`, ordered on `stream`, to be compared with the hash `before`. Does not block."""
        self._pairs.append(_Pair(tag, before, self.hash(address, nbytes, stream)))
        self.compared += 1

    def differing(self) -> tuple[list[Tag], list[Tag]]:
        """The tags of all pairs since the last call, and the tags of pairs that differ. Blocks until this is known."""
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return [], []
        has_grad_mode = torch.is_grad_enabled()
        try:  # torch.no_grad() could leave grad mode off if Ctrl-C interrupts it
            torch._C._set_grad_enabled(False)
            with outside_of_transforms(), no_dispatch():
                differ = torch.cat([pair.before for pair in pairs]) != torch.cat([pair.after for pair in pairs])
                wrong: list[int] = differ.nonzero().flatten().tolist()
        finally:
            torch._C._set_grad_enabled(has_grad_mode)
        self.failed += len(wrong)
        return [pair.tag for pair in pairs], [pairs[index].tag for index in wrong]


class IntegrityCheck(HashPairs[str]):
    """Integrity mode. The tags are the labels of storages in errors."""

    def finish_step(self, step: int) -> None:
        """Blocks until the comparisons are done; raises IntegrityError if any pair differs."""
        _, wrong = self.differing()
        if wrong:
            raise IntegrityError(storages=len(wrong), first=wrong[0], step=step)
