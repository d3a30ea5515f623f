"""A parameter on the host, and its copy on the device while it is used.

[Note: Parameters on the host] While it is away, the parameter is a tensor on the CPU: the same object, whose data is
the host copy. Whoever reads, saves or copies it needs to know nothing of vdnn, and gets its values. While its module
runs, its data is the copy on the device. That copy is dropped, or written to the host first if something wrote to it
(writes). An optimizer's step changes it, on a copy of its own that is written to the host behind the step
(stepped_parameters).

[Note: One memory] Either the host copy or the copy on the device is the memory of the parameter, and `is_in_place` says
which. The copy on the device stays in place while a module or a graph uses it, and while the program holds its memory:
a view, `detach()`, a storage, numpy, DLPack. The host copy may be held by the program at any time, because it never
changes its place; the next use fetches values that were written to it.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from vdnn.runtime.torch_internals.data_reads import set_native_data
from vdnn.runtime.torch_internals.memory_holders import natively_held
from vdnn.runtime.torch_internals.tensor_kinds import outside_of_inference_mode
from vdnn.runtime.training_state.homes import managed
from vdnn.runtime.training_state.host_tensor import HostTensor, host_tensor_for
from vdnn.runtime.training_state.state_copies import StateCopies, StateCopy


class Manager(Protocol):
    """Manages parameters for one session."""

    def drop(self, away: AwayParameter) -> bool:
        """Drops the copy on the device. The parameter's data are on the host then. False if it is in use there."""

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
    is_shared: bool  # used more than once in a graph, see GraphUses
    on_device: StateCopy | None = None
    version: int = 0  # of the parameter when it was fetched, or when its copies were last equal
    copy_version: int = 0  # the same of the copy on the device
    is_in_place: bool = False  # the parameter's data are the copy on the device
    is_exposed: bool = False  # the program took `.data` of the copy on the device: its writes are not counted
    is_copied_out: bool = False  # behind each use, whatever the counters say
    stays: bool = False  # its copy on the device is in place until its room is needed, see state_room.py
    is_stepped: bool = False  # an optimizer has its data
    replaced: int = 0  # how often the program put other data in the place of the parameter's
    host_holders: tuple[int, int] = (0, 0)  # of the memory of the host, if the program holds none of it
    host_hash: int | None = None  # of the host copy, if the program holds its memory and this use is checked
    hash_before: torch.Tensor | None = None  # of the copy on the device, if this use is checked
    checks: int = 0  # uses that were checked when it was new
    all_checked: bool = True  # all uses so far were checked
    has_arrived: bool = False
    users: int = 0  # calls of modules that run, and a graph that holds it
    is_held: bool = False  # by a graph
    is_summed: bool = False  # a gradient of it was accumulated, so it is known whether it is shared
    in_parts: bool = False  # the running backward adds to its gradient more than once, see GraphUses
    accumulators: list[tuple[int, weakref.ref[object]]] = field(default_factory=list)  # of live graphs
    handles: tuple[Any, ...] = ()  # of hooks on the parameter
    native_address: int = field(default=0)  # of the storage on the device, once it has arrived
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.host.nbytes

    def put_in_place(self, moving: StateCopy) -> None:
        """The copy on the device is the parameter's data from now on."""
        with outside_of_inference_mode():
            set_native_data(self.parameter, moving.tensors[0])
        self.version, self.copy_version = self.parameter._version, moving.tensors[0]._version
        self.is_in_place, self.is_exposed = True, False

    def put_host_in_place(self) -> None:
        """The host copy is the parameter's data from now on."""
        with outside_of_inference_mode():
            set_native_data(self.parameter, self.host.tensor)
        self.is_in_place = self.is_exposed = self.stays = False

    def is_held_on_device(self) -> bool:
        """True if the program holds memory of the copy on the device, which is in place. See [Note: One memory]."""
        return self.on_device is not None and is_held(self.on_device.tensors[0], tensors=2)

    def is_held_on_host(self) -> bool:
        """True if the program holds memory of the host copy. Nobody is asked for mapped memory, which other parameters
        share."""
        if self.is_mapped:
            return False
        held, references = holders_of(self.host.tensor)
        own_held, own_references = self.host_holders
        if held <= own_held and references <= own_references:
            return False
        is_the_parameters = storage_address(self.parameter) == storage_address(self.host.tensor)
        return held > own_held + is_the_parameters or references > own_references

    @property
    def device(self) -> torch.device:
        return self.home or self.copies.transport.torch_device

    def fetched(self) -> StateCopy:
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
        storage = storage_address(self.parameter)
        if storage == storage_address(self.host.tensor):
            return True
        return self.on_device is not None and storage == storage_address(self.on_device.tensors[0])


def storage_address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def is_held(tensor: torch.Tensor, *, tensors: int) -> bool:
    """True if more than `tensors` tensors hold the memory of `tensor`, or anything else does."""
    held, references = holders_of(tensor)
    return held > _HELD_BY_ONE[0] + tensors - 1 or references > _HELD_BY_ONE[1]


def holders_of(tensor: torch.Tensor) -> tuple[int, int]:
    """How often the storage is held by torch, numpy and DLPack, and how often its Python object."""
    storage = tensor.untyped_storage()
    return natively_held(storage._cdata), sys.getrefcount(storage)


_HELD_BY_ONE = holders_of(torch.zeros(1))


def away_of(parameter: torch.Tensor) -> AwayParameter | None:
    """`parameter` as the session knows it that manages it."""
    known = managed(parameter)
    return known if isinstance(known, AwayParameter) else None
