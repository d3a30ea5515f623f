"""The session: the context manager around a training loop.

Entering installs the hooks on this thread, exiting removes them. A tensor saved inside may be used after the exit, at
any time: packed objects carry all they need. A session may be entered again, and on several threads at once. While one
session is active on a thread, entering another there raises, unless one of the two nests: then the innermost wins.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vdnn import _C
from vdnn.errors import VdnnError
from vdnn.planning.policies import OnlinePolicy
from vdnn.runtime.machine.tensor_device import TensorDevice
from vdnn.runtime.recompute.rechecks import DEFAULT_ONE_IN, Rechecks
from vdnn.runtime.recompute.tolerance import Tolerance
from vdnn.runtime.session.function_transforms import hooks_that_step_aside
from vdnn.runtime.session.hooks import Packer
from vdnn.runtime.session.report import session_report
from vdnn.runtime.steps.ends import in_backward
from vdnn.runtime.steps.options import StepOptions
from vdnn.runtime.steps.unwatched import Steps, UnwatchedSteps
from vdnn.runtime.steps.watch import StepWatch
from vdnn.runtime.storage.counters import Counters
from vdnn.runtime.storage.integrity import IntegrityCheck
from vdnn.runtime.storage.transport import Integrity, Transport, TransportOptions
from vdnn.runtime.torch_internals.cuda_graphs import refuse_graphs_in
from vdnn.runtime.torch_internals.module_watch import MarkedModules, ModuleWatch
from vdnn.runtime.torch_internals.storage_set import StorageSet
from vdnn.runtime.torch_internals.tensor_kinds import storage_of
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording
from vdnn.step.saved_step import SavedStep
from vdnn.step.timeline import Timeline

logger = logging.getLogger("vdnn")

_marked_storages = StorageSet()
_marked_modules = MarkedModules()
_this_thread = threading.local()


class _Entry(NamedTuple):
    """A session that a thread has entered, with the hooks it installed there."""

    session: Session
    hooks: torch.autograd.graph.saved_tensors_hooks


def _entries_of_thread() -> list[_Entry]:
    """The sessions that this thread has entered, the outermost first."""
    entered: list[_Entry] | None = getattr(_this_thread, "entered", None)
    if entered is None:
        entered = _this_thread.entered = []
    return entered


class _Transports(dict[torch.device, Transport | None]):
    """One transport for each device, opened at the first lookup. The caller holds the packer's lock, so that two
    threads do not open one device twice."""

    def __init__(self, open_transport: Callable[[torch.device], Transport | None]) -> None:
        super().__init__()
        self._open_transport = open_transport

    def __missing__(self, device: torch.device) -> Transport | None:
        return self.setdefault(device, self._open_transport(device))


class Session(contextlib.ContextDecorator):
    """The context manager that vdnn.offload returns. It also works as a decorator."""

    def __init__(
        self,
        policy: OnlinePolicy,
        device: str | _C.Device | TensorDevice | None,
        min_bytes: int,
        options: TransportOptions,
        *,
        steps: StepOptions | None = None,
        integrity: bool = False,
        nests: bool = False,
        tolerance: float | None = None,
        recheck: int = DEFAULT_ONE_IN,
    ) -> None:
        self.policy = policy
        self.counters = Counters()
        self._device = device
        self._options = options
        self._integrity = integrity
        self._transports = _Transports(self._open_transport)
        self._nests = nests
        self._modules = ModuleWatch(_marked_modules, self._call_begins)
        self._checked_models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._steps: Steps = (
            UnwatchedSteps(self._compare_hashes, recomputes=policy.recomputes)
            if steps is None
            else StepWatch(steps, self._modules, self._compare_hashes)
        )
        self._tolerance = Tolerance(tolerance)
        self._rechecks = Rechecks(recheck)
        self._packer = Packer(
            policy,
            min_bytes,
            self.counters,
            self._modules,
            _marked_storages,
            self._transports,
            self._steps,
            self._tolerance,
            self._rechecks,
        )
        self._entering = threading.Lock()
        self._inside = 0  # entries of all threads
        self._installed = contextlib.ExitStack()
        self._has_warned = False

    # Entering and exiting.

    def __enter__(self) -> Session:
        entered = _entries_of_thread()
        if not self._nests and not all(entry.session is self or entry.session._nests for entry in entered):
            raise VdnnError("a vdnn session is active on this thread already. Exit it before you enter another one.")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise VdnnError("vdnn.offload cannot be entered while a CUDA graph is being captured. Capture without it.")
        hooks = torch.autograd.graph.saved_tensors_hooks(self._packer.pack, self._packer.unpack)
        self._install()
        try:
            hooks.__enter__()
        except BaseException:  # raised where saved-tensor hooks are disabled
            self._uninstall()
            raise
        entered.append(_Entry(self, hooks))
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        entered = _entries_of_thread()
        if not entered or entered[-1].session is not self:
            raise VdnnError("exit a vdnn session on the thread that entered it, the last entered first.")
        entered.pop().hooks.__exit__()
        self._uninstall()
        if kind is None and all(entry.session is not self for entry in entered):
            with self._packer.lock:
                self._steps.end_step_if_graphs_are_gone()
            self._warn_if_nothing_was_offloaded()
            self._compare_hashes()

    def _install(self) -> None:
        """Installs torch's process-wide hooks at the first entry. They stay until the last thread exits."""
        with self._entering:
            if not self._inside:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(self._modules)
                    stack.enter_context(hooks_that_step_aside())
                    for handle in self._packer.watch_modules():
                        stack.callback(handle.remove)
                    stack.callback(register_optimizer_step_pre_hook(self._optimizer_steps).remove)
                    stack.callback(register_optimizer_step_post_hook(self._optimizer_stepped).remove)
                    self._installed = stack.pop_all()
            self._inside += 1

    def _uninstall(self) -> None:
        with self._entering:
            self._inside -= 1
            if not self._inside:
                self._installed.close()

    def close(self) -> None:
        """Waits for all copies and returns host memory and streams. A graph saved inside can then run backward only if
        its storages are still on the device. A session that is garbage-collected does the same."""
        with self._packer.lock:
            while self._transports:
                _, transport = self._transports.popitem()
                if transport is not None:
                    transport.close()

    def look_into(self, model: torch.nn.Module) -> None:
        """Raises if the model contains a part that cannot run in a session. The first call of a model inside a session
        does the same."""
        if self._steps.is_watching or self.policy.may_offload:
            refuse_graphs_in(model, _marked_modules)
        self._checked_models.add(model)

    def _call_begins(self, model: torch.nn.Module) -> None:
        if torch.is_grad_enabled() and not self._packer.exemptions.is_paused and model not in self._checked_models:
            self.look_into(model)

    # Steps.

    def step(self) -> None:
        """Marks the end of a training step. Without this call the session detects the ends of steps."""
        if self._packer.in_forked_child:
            return
        with self._packer.lock:
            self._steps.end_step()

    @property
    def num_steps(self) -> int:
        """The number of completed steps. In a session without a plan and without a measurement, a step ends at
        session.step() or an optimizer's step only."""
        return self._steps.steps

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Called before the optimizer writes to its parameters."""
        if self._packer.in_forked_child or not self._trains_here(optimizer):
            return
        self._packer.before_optimizer(optimizer)
        with self._packer.lock:
            self._rechecks.finish()

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._packer.in_forked_child or not self._trains_here(optimizer):
            return  # an optimizer of another thread, whose model is not trained in this session
        with self._packer.lock:
            self._steps.optimizer_stepped(optimizer)

    def _trains_here(self, optimizer: torch.optim.Optimizer) -> bool:
        if any(entry.session is self for entry in _entries_of_thread()):
            return True
        # A GPU's backward and its hooks run on threads of their own. There, look for a parameter of this session.
        parameters = optimizer.param_groups[0]["params"] if in_backward() else []
        return bool(parameters) and parameters[0].untyped_storage() in self._modules.parameters

    def _compare_hashes(self) -> None:
        for check in self._checks():
            check.finish_step(self.num_steps)
        self._rechecks.step_ended()

    @property
    def recording(self) -> Recording | None:
        """The saves and uses of one step. None until one whole step after the warm-up has run, and None in a session
        that does not measure."""
        return self._steps.recording

    @property
    def plan(self) -> Plan | None:
        """The plan that the session follows, or None."""
        return self._steps.plan

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the last whole step after the warm-up, or None. Set only if the session measures. Reading it
        may block until the device has completed that step."""
        return self._steps.timeline

    @property
    def host_bytes(self) -> int:
        """The largest number of bytes of host memory that this session has had pinned at one time."""
        return sum(transport.pool.stats.pinned_peak_bytes for transport in self._opened())

    def save(self, run: str | os.PathLike[str], name: str = "step") -> None:
        """Writes the recording, plan and timeline to a folder that `vdnn report` reads, as far as the session has them:
        see those properties. May block as `timeline` does."""
        SavedStep(name, self.recording, self.plan, None, self.timeline).save(run)

    # Devices.

    def _open_transport(self, device: torch.device) -> Transport | None:
        given = self._device
        if isinstance(given, TensorDevice):
            if device.type != given.torch_type:
                return None
            transport = Transport(
                device, given.device, self._options, fake=given.fake, stream_of_torch=given.current_stream
            )
        else:
            native = self._native_device(device)
            if native is None:
                return None
            transport = Transport(device, native, self._options, owns_device=native is not given)
        if self._integrity and not transport.fake:
            transport.integrity = IntegrityCheck(transport)
        return transport

    def _native_device(self, device: torch.device) -> _C.Device | None:
        """The native device for a device of torch, or None if its tensors are not offloaded."""
        if device.type == "cuda" and self._device in (None, "cuda"):
            return _C.CudaDevice(device.index or 0)
        if device.type != "cpu":
            return None
        if self._device == "sim":
            return _C.SimDevice()
        if isinstance(self._device, _C.Device):
            return self._device
        logger.warning(
            "vdnn: tensors on the CPU are passed through. Move the model to a GPU, or use "
            "vdnn.offload(device='sim') to try it on the CPU."
        )
        return None

    # Reports.

    def report(self) -> str:
        """Text: what the session saved, moved and kept, and the reasons."""
        recipe_lines = self._tolerance.lines() + self._rechecks.lines()
        return session_report(self.policy.name, self.counters, self._opened(), self._steps, recipe_lines)

    def _checks(self) -> list[Integrity]:
        return [transport.integrity for transport in self._opened() if transport.integrity is not None]

    def _opened(self) -> list[Transport]:
        return [transport for transport in list(self._transports.values()) if transport is not None]

    def _warn_if_nothing_was_offloaded(self) -> None:
        counters = self.counters
        if self._has_warned or self._plan_offloads_nothing():
            return
        if counters.saves and not counters.storages and not counters.discarded and self.policy.name != "keep":
            self._has_warned = True
            reasons = ", ".join(f"{count} x {reason.value}" for reason, count in counters.kept.most_common(3))
            logger.warning("vdnn: none of %d saves was offloaded (%s).", counters.saves, reasons or "none eligible")

    def _plan_offloads_nothing(self) -> bool:
        return self.plan is not None and self.plan.offloaded_bytes == 0

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return self._packer.exemptions.paused()


def active_session() -> Session | None:
    """The innermost session of this thread, or None."""
    entered = _entries_of_thread()
    return entered[-1].session if entered else None


def mark_to_keep(what: torch.Tensor | torch.nn.Module) -> None:
    """Every session keeps `what` on the device from now on."""
    if isinstance(what, torch.Tensor):
        storage = storage_of(what)
        if storage is not None:  # a tensor without a storage is never managed
            _marked_storages.add(storage)
    else:
        _marked_modules.add(what)
