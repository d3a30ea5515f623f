"""A virtual machine: tensors without data, a simulated device with a clock, and an exact count of memory.

Unmodified training code runs inside, VGG-16 at batch 256 in a fraction of a second. Every operation advances the
compute stream by its time on the named hardware, every copy takes its time on that hardware's link, and every storage
counts from its allocation to its release. With `fake=False` the tensors are real ones on the CPU and copies move their
bytes, with the same times and the same count.

    with VirtualMachine("titan-x") as machine:
        model, x = vgg16(), torch.empty(256, 3, 224, 224)
        with vdnn.offload("vdnn-all", device=machine):
            model(x).sum().backward()
        print(machine.peak_bytes, machine.now_ns)
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from vdnn import _C
from vdnn.bytesize import format_bytes
from vdnn.errors import VdnnError
from vdnn.hardware import HardwareProfile, HostFigures, load_profile
from vdnn.runtime.machine.allocation_tracker import AllocationTracker
from vdnn.runtime.machine.roofline import operation_ns
from vdnn.runtime.machine.tensor_device import TensorDevice
from vdnn.runtime.machine.workspaces import Workspace, workspace_of
from vdnn.runtime.torch_internals.fake_modules import fake_modules_can_be_converted


class VirtualMachine(TensorDevice):
    """A context manager: make the model and its inputs inside, and train. For one thread only.

    With `host`, the machine also counts the time in which the host issues the operations. That does not delay the
    device: a step whose host runs ahead takes the longer of both times. With `workspaces`, it counts what libraries
    allocate: workspaces.py has the upper figures, of which the machine keeps the largest."""

    def __init__(
        self,
        hardware: str | os.PathLike[str] | HardwareProfile,
        *,
        fake: bool = True,
        host: HostFigures | None = None,
        workspaces: bool = False,
        schedule: _C.Schedule = _C.Schedule.EAGER,
        seed: int = 0,
    ) -> None:
        self.profile = hardware if isinstance(hardware, HardwareProfile) else load_profile(hardware)
        self.fake = fake
        link = _C.LinkModel(
            to_host_bytes_per_s=self.profile.to_host_bytes_per_s,
            to_device_bytes_per_s=self.profile.to_device_bytes_per_s,
            duplex_bytes_per_s=self.profile.duplex_bytes_per_s,
            latency_ns=self.profile.link_latency_ns,
        )
        self.device: _C.SimDevice = _C.SimDevice(
            schedule=schedule,
            seed=seed,
            moves_bytes=not fake,
            link=link,
            name=self.profile.name,
            total_bytes=self.profile.memory_bytes,
        )
        self._compute = self.device.adopt_stream()
        self.tracker = AllocationTracker()
        self.operations = 0
        self.host = host
        self.counts_workspaces = workspaces
        self.largest_workspace: Workspace | None = None
        self.issued_ns = 0  # the time in which the host issued all operations so far, those of trials included
        self.aside_ns: int | None = None  # in a trial, the time of its operations, which do not advance the clock
        self._entered: contextlib.ExitStack | None = None

    def __enter__(self) -> VirtualMachine:
        if self._entered is not None:
            raise VdnnError("this virtual machine is already entered: make another one.")
        with contextlib.ExitStack() as stack:
            if self.fake:
                stack.enter_context(FakeTensorMode())
                stack.enter_context(fake_modules_can_be_converted())
            stack.enter_context(self.tracker)
            if self.counts_workspaces:
                self.tracker.hold(self.profile.libraries.get("cublas_bytes", 0))
            self.tracker.on_operation = self.advance  # only while entered: a machine that is left is freed at once
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._entered is None:
            raise VdnnError("this virtual machine was not entered: use it in a `with` statement.")
        self._entered.__exit__(None, None, None)
        self._entered = self.tracker.on_operation = None

    @property
    def is_entered(self) -> bool:
        return self._entered is not None

    def advance(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Counts an operation: its time, and the workspace of a library."""
        self.advance_by(*self.cost_of(func, args, kwargs, out))

    def cost_of(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> tuple[int, Workspace | None]:
        """The time of an operation, and the workspace that a library takes for it."""
        workspace = workspace_of(self.profile, func, args, out) if self.counts_workspaces else None
        return operation_ns(self.profile, func, args, kwargs, out), workspace

    def advance_by(self, duration_ns: int, workspace: Workspace | None) -> None:
        """Counts an operation of this time and workspace."""
        if workspace is not None and self.aside_ns is None:
            self._work(workspace)
        if self.host is not None:
            self.issued_ns += self.host.operation_ns + (self.host.launch_ns if duration_ns else 0)
        if self.aside_ns is not None:
            self.aside_ns += duration_ns
        elif duration_ns:
            self.operations += 1
            self.device.advance(self._compute, duration_ns)

    def _work(self, workspace: Workspace) -> None:
        self.tracker.took(workspace.nbytes)
        if self.largest_workspace is None or workspace.nbytes > self.largest_workspace.nbytes:
            self.largest_workspace = workspace

    def current_stream(self) -> _C.Stream:
        return self._compute

    @property
    def now_ns(self) -> int:
        """The virtual time at which all operations so far are complete."""
        return self.device.now_ns(self._compute)

    @property
    def stall_ns(self) -> int:
        """The part of `now_ns` in which the compute stream stalled."""
        return self.device.stall_ns(self._compute)

    @property
    def allocated_bytes(self) -> int:
        return self.tracker.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The peak since reset_peak() or since the beginning. It may exceed profile.memory_bytes: see `fits`."""
        return self.tracker.peak_bytes

    def reset_peak(self) -> None:
        self.tracker.reset_peak()

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.profile.memory_bytes

    def __str__(self) -> str:
        return (
            f"{self.profile.name}: peak {format_bytes(self.peak_bytes)} of {format_bytes(self.profile.memory_bytes)}, "
            f"{self.now_ns / 1e6:.1f} ms, of which {self.stall_ns / 1e6:.1f} ms stalled"
        )
