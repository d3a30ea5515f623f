"""Hashes of storages, taken on the device before and after: integrity mode, and what rechecks compare with.

The comparison runs on the device and is read at the end of the step, when the stream has long passed: the training
loop waits for it once a step. In integrity mode everything that comes back is compared with what left, and a difference
is an error that names the storages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.utils._mode_utils import no_dispatch

from vdnn import _C
from vdnn.errors import IntegrityError
from vdnn.runtime.storage.transport import Transport

Tag = TypeVar("Tag")


@dataclass(frozen=True, slots=True)
class _Pair(Generic[Tag]):
    tag: Tag
    left: torch.Tensor
    came_back: torch.Tensor


class HashPairs(Generic[Tag]):
    """Of one transport: hashes before and after, each pair with a tag that tells what it is of."""

    def __init__(self, transport: Transport) -> None:
        self._device = transport.device
        self._torch_device = transport.torch_device
        self._pairs: list[_Pair[Tag]] = []
        self.compared = 0  # storages, since the session was made
        self.failed = 0

    def hash(self, address: int, nbytes: int, stream: _C.Stream) -> torch.Tensor:
        """Of the bytes there, as a tensor of one integer on the device, ordered on `stream`."""
        with no_dispatch():  # a virtual machine does not count it
            result = torch.empty(1, dtype=torch.int64, device=self._torch_device)
        call = _C.KernelCall(_C.Kernel.CONTENT_HASH, address, result.data_ptr(), nbytes)
        self._device.launch(call, stream)
        return result

    def compare(self, tag: Tag, left: torch.Tensor, address: int, nbytes: int, stream: _C.Stream) -> None:
        """Of a storage that is there again, as `stream` sees it."""
        self._pairs.append(_Pair(tag, left, self.hash(address, nbytes, stream)))
        self.compared += 1

    def differing(self) -> tuple[list[Tag], list[Tag]]:
        """The tags of what was compared since the last call, and of those that differ. Blocks until that is known."""
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return [], []
        has_grad_mode = torch.is_grad_enabled()
        try:  # not torch.no_grad(): Ctrl-C may come between its bytecodes
            torch._C._set_grad_enabled(False)
            with no_dispatch():
                differ = torch.cat([pair.left for pair in pairs]) != torch.cat([pair.came_back for pair in pairs])
                wrong: list[int] = differ.nonzero().flatten().tolist()
        finally:
            torch._C._set_grad_enabled(has_grad_mode)
        self.failed += len(wrong)
        return [pair.tag for pair in pairs], [pairs[index].tag for index in wrong]


class IntegrityCheck(HashPairs[str]):
    """Integrity mode. The tags name storages in errors."""

    def finish_step(self, step: int) -> None:
        """Blocks until the comparisons are done; raises what they show."""
        _, wrong = self.differing()
        if wrong:
            raise IntegrityError(storages=len(wrong), first=wrong[0], step=step)
