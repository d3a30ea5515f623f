"""A frozen parameter on the host, and its copy on the device while it is used.

[Note: Parameters on the host] While it is away, the parameter is a tensor on the CPU: the same object, whose data is
the host copy. Whoever reads, saves or copies it needs to know nothing of vdnn, and gets its values. While its module
runs, its data is the copy on the device, which nobody writes to; so it only comes in, and is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vdnn.runtime.training_state.host_tensor import HostTensor, host_tensor_for
from vdnn.runtime.training_state.state_copies import Moving, StateCopies


@dataclass(slots=True, eq=False)
class AwayParameter:
    """One parameter that a session manages. `number` is its position, `owner` that of the first module that has it."""

    name: str
    number: int
    owner: int
    parameter: torch.nn.Parameter
    host: HostTensor
    copies: StateCopies
    is_mapped: bool
    home: torch.device | None  # the device to which it returns at the end; None: it was on the host before
    on_device: Moving | None = None
    version: int = 0  # of the parameter when it was fetched
    has_arrived: bool = False
    users: int = 0  # calls of modules that run
    native_address: int = field(default=0)  # of the storage on the device, once it has arrived

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    def fetched(self) -> Moving:
        """Issues the copy to the device. Mapped memory is not pinned, so its bytes pass through pinned memory, whose
        lease ends with the copy. Blocks while pages are read from the file, and until that memory may be written."""
        if not self.is_mapped:
            return self.copies.fetch([self.host])
        transport = self.copies.transport
        passing = host_tensor_for(self.host.tensor, transport)
        for event in passing.block.last_uses:
            transport.device.synchronize(event)
        passing.tensor.copy_(self.host.tensor)
        moving = self.copies.fetch([passing])
        moving.hosts = [self.host]
        return moving

    def is_there(self) -> bool:
        """True if the parameter's data are the host copy or the one on the device, and not what a program put there."""
        storage = self.parameter.untyped_storage()._cdata
        if storage == self.host.tensor.untyped_storage()._cdata:
            return True
        return self.on_device is not None and storage == self.on_device.tensors[0].untyped_storage()._cdata
