"""Integrity mode: what comes back is what left, shown by a hash of each storage taken on the device before and after.

The comparison runs on the device and is read at the end of the step, when the stream has long passed: the training loop
waits for it once a step. A difference is an error that names the storages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vdnn import _C
from vdnn.errors import IntegrityError
from vdnn.runtime.transport import Transport


@dataclass(frozen=True, slots=True)
class _Pair:
    label: str
    left: torch.Tensor
    came_back: torch.Tensor


class IntegrityCheck:
    """Of one transport."""

    def __init__(self, transport: Transport) -> None:
        self._device = transport.device
        self._torch_device = transport.torch_device
        self._pairs: list[_Pair] = []
        self.compared = 0  # storages, since the session was made
        self.failed = 0

    def hash(self, address: int, nbytes: int, stream: _C.Stream) -> torch.Tensor:
        """Of the bytes there, as a tensor of one integer on the device, ordered on `stream`."""
        result = torch.empty(1, dtype=torch.int64, device=self._torch_device)
        call = _C.KernelCall(_C.Kernel.CONTENT_HASH, address, result.data_ptr(), nbytes)
        self._device.launch(call, stream)
        return result

    def compare(self, label: str, left: torch.Tensor, address: int, nbytes: int, stream: _C.Stream) -> None:
        """Of a reload that is there, as `stream` sees it. The label names the storage in errors."""
        self._pairs.append(_Pair(label, left, self.hash(address, nbytes, stream)))
        self.compared += 1

    def finish_step(self, step: int) -> None:
        """Blocks until the comparisons are done; raises what they show."""
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return
        with torch.no_grad():
            differ = torch.cat([pair.left for pair in pairs]) != torch.cat([pair.came_back for pair in pairs])
            wrong: list[int] = differ.nonzero().flatten().tolist()
        if wrong:
            self.failed += len(wrong)
            raise IntegrityError(storages=len(wrong), first=pairs[wrong[0]].label, step=step)
