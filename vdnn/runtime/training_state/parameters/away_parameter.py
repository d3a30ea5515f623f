"""A parameter on the host, and its copy on the device while it is used.

[Note: Parameters on the host] While it is away, the parameter is a tensor on the CPU: the same object, whose data is
the host copy. Whoever reads, saves or copies it needs to know nothing of vdnn, and gets its values. While its module
runs, its data is the copy on the device, which nobody writes to; so it only comes in, and is dropped. An optimizer's
step changes it, on a copy of its own that is written to the host behind the step (stepped_parameters).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from vdnn.runtime.training_state.homes import managed
from vdnn.runtime.training_state.host_tensor import HostTensor, host_tensor_for
from vdnn.runtime.training_state.state_copies import Moving, StateCopies


class Manager(Protocol):
    """Manages parameters for one session."""

    def drop(self, away: AwayParameter) -> None:
        """Drops the copy on the device. The parameter's data are on the host then."""

    def stay(self, away: AwayParameter, data: torch.Tensor, reason: str) -> None:
        """`data` on the device are those of the parameter from now on. Nobody manages it any longer."""


@dataclass(eq=False)  # no slots: they take weak references from Python 3.11 on
class AwayParameter:
    """One parameter that a session manages. `number` is its position, `owner` that of the first module that has it."""

    name: str
    number: int
    owner: int
    parameter: torch.nn.Parameter
    host: HostTensor
    copies: StateCopies
    manager: Manager
    is_mapped: bool
    home: torch.device | None  # the device to which it returns at the end; None: it was on the host before
    is_trained: bool  # an optimizer of the session has it
    is_shared: bool  # used more than once in a graph, see graph_uses
    on_device: Moving | None = None
    version: int = 0  # of the parameter when it was fetched
    has_arrived: bool = False
    users: int = 0  # calls of modules that run, and a graph that holds it
    is_held: bool = False  # by a graph
    in_parts: bool = False  # the running backward adds to its gradient more than once, see graph_uses
    accumulators: list[tuple[int, weakref.ref[object]]] = field(default_factory=list)  # of live graphs
    handles: tuple[Any, ...] = ()  # of hooks on the parameter
    native_address: int = field(default=0)  # of the storage on the device, once it has arrived

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    @property
    def device(self) -> torch.device:
        return self.home or self.copies.transport.torch_device

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


def away_of(parameter: torch.Tensor) -> AwayParameter | None:
    """`parameter` as the session knows it that manages it."""
    known = managed(parameter)
    return known if isinstance(known, AwayParameter) else None
