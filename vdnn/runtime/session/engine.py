"""The engine does the work of a session and outlives it: hooks, devices, pinned memory, steps and their plans.

[Note: As one] Sessions that plan and have the same options on the same device share an engine, one after another. So a
session for each step, or for each epoch, learns, plans and pins as one session around the whole loop does. Sessions
nested on one thread share an engine, too. Sessions on two threads at one time do not: their steps would mix.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vdnn import _C
from vdnn.errors import VdnnError
from vdnn.planning.policies import OnlinePolicy
from vdnn.runtime.machine.tensor_device import TensorDevice
from vdnn.runtime.recompute.rechecks import DEFAULT_ONE_IN, Rechecks
from vdnn.runtime.recompute.tolerance import Tolerance
from vdnn.runtime.session.abandoned import end_what_is_over, end_with_its_graphs
from vdnn.runtime.session.as_needed import GrownExtents
from vdnn.runtime.session.function_transforms import let_hooks_step_aside
from vdnn.runtime.session.hooks import Packer
from vdnn.runtime.session.marked import marked_modules, marked_storages
from vdnn.runtime.session.saves import Saves
from vdnn.runtime.session.unseen import Unseen
from vdnn.runtime.steps.steps import StepOptions, Steps, StepWatch, UnwatchedSteps
from vdnn.runtime.storage.counters import Counters
from vdnn.runtime.storage.integrity import IntegrityCheck
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.transport import Integrity, Transport, TransportOptions, streams_of_thread
from vdnn.runtime.torch_internals.backward_ends import in_backward
from vdnn.runtime.torch_internals.cuda_graphs import keep_dynamo_out, refuse_graphs_in
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.runtime.torch_internals.saved_hooks import let_backwards_run_without_hooks
from vdnn.runtime.torch_internals.tensor_kinds import storage_of
from vdnn.runtime.training_state.optimizer_state import OptimizerState
from vdnn.runtime.training_state.parameters.managed_parameters import ManagedParameters
from vdnn.runtime.training_state.parameters.packed_parameter import ParameterSaves
from vdnn.runtime.training_state.slices import parameters_of
from vdnn.runtime.training_state.state_room import StateRoom
from vdnn.user_warnings import warn

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


class Transports(dict[torch.device, Transport | None]):
    """One transport for each device, opened at the first lookup. The caller holds the lock of the saves, so that two
    threads do not open one device twice."""

    def __init__(self, open_transport: Callable[[torch.device], Transport | None]) -> None:
        super().__init__()
        self._open_transport = open_transport

    def __missing__(self, device: torch.device) -> Transport | None:
        return self.setdefault(device, self._open_transport(device))

    def opened(self) -> list[Transport]:
        return [transport for transport in list(self.values()) if transport is not None]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of vdnn.offload, checked. `steps` None: the session watches no steps."""

    policy: OnlinePolicy
    device: str | _C.Device | TensorDevice | None
    min_bytes: int
    transport: TransportOptions
    steps: StepOptions | None = None
    integrity: bool = False
    tolerance: float | None = None
    recheck: int = DEFAULT_ONE_IN
    has_parameters: bool = False  # the session manages parameters


class _SessionOnThread(NamedTuple):
    session: object
    thread: int


class Engine:
    """The hooks of one session or of several, and all that they need. Its parts have tests of their own."""

    def __init__(self, options: EngineOptions) -> None:
        self.policy = options.policy
        self._options = options
        self.transports = Transports(_weakly(self._open_transport))
        self.modules = ModuleWatch(marked_modules, _weakly(self._call_begins))
        self.optimizer_states: weakref.WeakSet[OptimizerState] = weakref.WeakSet()  # that have memory here
        self.state_room = StateRoom(_weakly(self._managed_states), _weakly(self._managed_parameters))
        self.extents = GrownExtents()
        self._checked_models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        saves_of_steps: list[weakref.ref[Saves]] = []  # the steps evict by the saves, which need the steps
        self.steps: Steps = (
            UnwatchedSteps(_weakly(self.compare_hashes))
            if options.steps is None
            else StepWatch(
                options.steps,
                self.modules,
                _weakly(self.compare_hashes),
                _evict_by(saves_of_steps),
                self.state_room.leave,
                self.extents.refused,
            )
        )
        self.tolerance = Tolerance(options.tolerance)
        self.rechecks = Rechecks(options.recheck, failed=self.steps.forget_stored_plans)
        self.parameter_saves = ParameterSaves() if options.has_parameters else None
        self.saves = saves = Saves(self.policy, Counters(), self.modules, marked_storages, self.transports, self.steps)
        self.packer = Packer(
            saves, options.min_bytes, self.modules, self.tolerance, self.rechecks, self.parameter_saves
        )
        saves_of_steps.append(weakref.ref(saves))
        self._passes_cpu = False  # tensors on the CPU, which no device of this session takes
        self.is_closed = False
        self.has_warned = False
        self.unseen = Unseen()
        self.optimizer_steps = 0  # that sessions have seen
        self._installing = threading.Lock()
        self._entries: list[_SessionOnThread] = []
        self._entered_streams: list[list[int]] = []  # different ones, each a handle for every CUDA device
        self._installed: list[Callable[[], object]] = []  # what removes each hook

    def __del__(self) -> None:
        """No session has this engine any more. Its hooks end with the last graph that needs them."""
        packer: Packer | None = vars(self).get("packer")
        if packer is not None:
            end_with_its_graphs(packer)

    # Entering and leaving.

    def install(self, session: object) -> None:
        """`session` is entered on this thread. Installs torch's process-wide hooks at the first entry. They stay until
        the last thread leaves."""
        _free_what_is_over()
        with self._installing:
            if not self._entries:
                try:
                    self._install()
                except BaseException:
                    self._remove_hooks()
                    raise
            self._entries.append(_SessionOnThread(session, threading.get_ident()))
        handles = streams_of_thread()
        if handles and handles not in self._entered_streams:
            with self.saves.lock:
                self._entered_streams.append(handles)
                for transport in self.transports.opened():
                    self._adopt_entered(transport)

    def _install(self) -> None:
        installed = self._installed  # not an ExitStack, which costs as much as what it holds
        installed.append(self.modules.install())
        installed.append(let_hooks_step_aside())
        installed.append(let_backwards_run_without_hooks())
        installed.extend(self.packer.watch_modules())
        installed.append(register_optimizer_step_pre_hook(self._optimizer_steps).remove)
        installed.append(register_optimizer_step_post_hook(self._optimizer_stepped).remove)

    # What sessions manage, see as_needed.py.

    def budget_bytes(self, device_bytes: int) -> int | None:
        """The budget of every step on a device of `device_bytes`; None without a budget in bytes."""
        steps = self._options.steps
        return None if steps is None or steps.planner is None else steps.planner.fixed_bytes(device_bytes)

    def manage_parameters(self) -> None:
        """Hooks that are installed from now on pack views of managed parameters."""
        if self.parameter_saves is None:
            self.parameter_saves = ParameterSaves()
            self.packer.manage_parameters(self.parameter_saves)

    def times_entered(self, session: object) -> int:
        return sum(entry.session is session for entry in self._entries)

    def is_alone_and_idle(self, session: object) -> bool:
        """True if no other session is entered here, and no module or backward runs."""
        is_alone = self._entries == [_SessionOnThread(session, threading.get_ident())]
        return is_alone and not in_backward() and not self.modules.stack()

    def states_begin(self, states: Sequence[OptimizerState]) -> None:
        """Called as a session with these is entered. If no session here has managed one of them, they are of another
        model or of new optimizers: their first steps are a warm-up, and what stayed of those that are gone is
        forgotten."""
        if not states or any(one in self.optimizer_states for one in states):
            return
        there = [one.optimizer for one in self.optimizer_states if not one.is_gone]
        with self.saves.lock:
            self.steps.warm_up_again()
            self.state_room.forget_all_but({id(parameter) for one in there for parameter in parameters_of(one)})

    def grow(self) -> None:
        """More of the training state leaves from now on. Steps are recorded and planned anew."""
        with self.saves.lock:
            self.steps.begin_anew()
            self.state_room.begin_anew(self.steps)

    def _remove_hooks(self) -> None:
        try:
            while self._installed:
                self._installed.pop()()
        finally:
            if self._installed:  # one was interrupted
                self._remove_hooks()

    def _adopt_entered(self, transport: Transport) -> None:
        """The program may allocate on the stream on which it entered the session, and save on others alone."""
        if transport.torch_device.type == "cuda":
            for handles in self._entered_streams:
                transport.adopt_stream(handles[transport.torch_device.index or 0])

    def uninstall(self, session: object) -> None:
        with self._installing:
            self._entries.remove(_SessionOnThread(session, threading.get_ident()))
            if not self._entries:
                self._remove_hooks()
        _free_what_is_over()

    def is_free_for(self, session: object) -> bool:
        """False while another session is inside on another thread, once this is closed, and in a forked child, which
        inherits no device and no thread."""
        is_usable = not self.is_closed and not self.saves.in_forked_child
        thread = threading.get_ident()
        return is_usable and all(entry.session is session or entry.thread == thread for entry in self._entries)

    def resumed(self) -> None:
        """This thread's saves come here from now on."""
        with self.saves.lock:
            self.steps.resumed()

    def left(self) -> None:
        """The last session of this thread has left."""
        self._refuse_the_cpu()
        with self.saves.lock:
            self.steps.end_step_if_graphs_are_gone()

    def leave_plans(self) -> None:
        """Called when a session is left, also by an exception: writes its plans to its plan folder, as far as they are
        new, and cancels the search for better ones."""
        if not self.saves.in_forked_child:
            with self.saves.lock:
                self.steps.stop_searching()
                self.steps.store_plans()

    def close(self) -> None:
        """Waits for all copies and returns host memory and streams."""
        opened = self.transports.opened()
        for managed in [one for one in self.optimizer_states if one.is_in(opened)]:
            managed.gradients.bring_back()
            managed.bring_back()
        self.is_closed = True
        with self.saves.lock:
            while self.transports:
                _, transport = self.transports.popitem()
                if transport is not None:
                    transport.close()

    def look_into(self, model: torch.nn.Module) -> None:
        """Raises if the model contains a part that cannot run in a session. The first call of a model inside a session
        does the same."""
        if self._has_work:
            refuse_graphs_in(model, marked_modules)
        self._checked_models.add(model)

    @property
    def _has_work(self) -> bool:
        return self.steps.is_watching or self.policy.may_offload

    def _call_begins(self, model: torch.nn.Module) -> None:
        if not torch.is_grad_enabled() or self.saves.exemptions.is_paused:
            return
        if model not in self._checked_models:
            self.look_into(model)
        if self._has_work and not self._has_entered() and not self.saves.in_forked_child:
            self.unseen.model_begins_elsewhere(model)

    def _has_entered(self) -> bool:
        """True if this thread has entered a session of this engine."""
        thread = threading.get_ident()
        return any(entry.thread == thread for entry in self._entries)

    # Steps.

    def begin_step(self, device: torch.device) -> None:
        """Begins the first step of a session that measures now, as later steps begin, and not with its first save."""
        transport = self.transport_for(device)
        if transport is not None:
            with self.saves.lock:
                self.steps.hook(transport)

    def end_step(self) -> None:
        self.unseen.are_steps_marked = True
        if not self.saves.in_forked_child:
            with self.saves.lock:
                self.steps.end_step()
            self.extents.step_ended()

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Called before the optimizer writes to its parameters."""
        if self.saves.in_forked_child or not self._trains_here(optimizer):
            return
        self._refuse_the_cpu()
        self.saves.before_optimizer(optimizer)
        with self.saves.lock:
            self.rechecks.finish()

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self.saves.in_forked_child:
            return
        if not self._trains_here(optimizer):  # an optimizer of another thread
            if self._has_work and self._has_used(optimizer):
                self.unseen.optimizer_stepped_elsewhere(optimizer)
            return
        self.optimizer_steps += 1
        with self.saves.lock:
            self.steps.optimizer_stepped(optimizer)
            if self.steps.is_planning:
                self.state_room.stepped(self.steps)
        self.extents.step_ended()

    def _managed_states(self) -> list[OptimizerState]:
        """Those that sessions which are entered here manage now, in an order that does not depend on the process."""
        managed = [one for one in self.optimizer_states if any(one.owner is entry.session for entry in self._entries)]
        return sorted(managed, key=lambda one: one.number)

    def _managed_parameters(self) -> list[ManagedParameters]:
        """Those that sessions which are entered here manage now."""
        return (
            [] if self.parameter_saves is None else [one for one in self.parameter_saves.managers() if one.is_managing]
        )

    def _trains_here(self, optimizer: torch.optim.Optimizer) -> bool:
        # A GPU's backward and its hooks run on threads of their own. There, look for a parameter of this session.
        return self._has_entered() or (in_backward() and self._has_used(optimizer))

    def _has_used(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if models have used a parameter of `optimizer` while the session was open."""
        parameters = optimizer.param_groups[0]["params"]
        storage = storage_of(parameters[0]) if parameters else None
        return storage is not None and storage in self.modules.parameters

    def compare_hashes(self) -> None:
        for check in self.checks():
            check.finish_step(self.steps.steps)
        self.rechecks.step_ended()
        if self.saves.recipes is not None:
            self.saves.recipes.step_ended()

    def checks(self) -> list[Integrity]:
        return [transport.integrity for transport in self.transports.opened() if transport.integrity is not None]

    # Devices.

    @property
    def _needs_gpu(self) -> bool:
        """True if the user asked for what tensors on the CPU cannot have."""
        steps = self._options.steps
        has_budget = steps is not None and steps.planner is not None and steps.planner.budget is not None
        return has_budget or self._options.device == "cuda"

    def _refuse_the_cpu(self) -> None:
        """Raises if only tensors on the CPU were saved. Some of them beside those of a GPU are nothing unusual."""
        if self._passes_cpu and self._needs_gpu and not self.transports.opened():
            raise VdnnError(
                "the model trains on the CPU, where nothing can be offloaded and no budget holds. Move the model and "
                "its inputs to the GPU, or try it on the CPU: vdnn.offload(device=machine, ...) inside "
                "`with vdnn.VirtualMachine('h100', fake=False) as machine:`."
            )

    def transport_for(self, device: torch.device) -> Transport | None:
        """The transport of a device, which this opens. None: its tensors stay where they are."""
        with self.saves.lock:
            return self.transports[device]

    def _open_transport(self, device: torch.device) -> Transport | None:
        given = self._options.device
        if isinstance(given, TensorDevice):
            if device.type != given.torch_type:
                return None
            if not given.is_entered:
                raise VdnnError(
                    "the VirtualMachine was not entered, so it has no time and counts no memory. Make the model, its "
                    "inputs and the session inside `with machine:`."
                )
            transport = Transport(
                device, given.device, self._options.transport, fake=given.fake, stream_of_torch=given.current_stream
            )
        else:
            native = self._native_device(device)
            if native is None:
                return None
            transport = Transport(device, native, self._options.transport, owns_device=native is not given)
            self._adopt_entered(transport)
        if self._options.integrity and not transport.fake:
            transport.integrity = IntegrityCheck(transport)
        transport.fits_budget = _weakly(self._fits)
        return transport

    def _fits(self, transport: Transport, nbytes: int) -> bool:
        return self.steps.fits(transport, nbytes)

    def _native_device(self, device: torch.device) -> _C.Device | None:
        """The native device for a device of torch, or None if its tensors are not offloaded."""
        given = self._options.device
        if device.type == "cuda" and given in (None, "cuda"):
            return _C.CudaDevice(device.index or 0)
        if device.type != "cpu":
            return None
        if given == "sim":
            return _C.SimDevice()
        if isinstance(given, _C.Device):
            return given
        self._passes_cpu = True
        if self._needs_gpu:
            return None
        warn(
            "tensors on the CPU are passed through. Move the model to a GPU, or use "
            "vdnn.offload(device='sim') to try it on the CPU."
        )
        return None


def _weakly(method: Callable[_Given, _Returned]) -> Callable[_Given, _Returned | None]:
    """`method` of an engine, for the engine's own parts: they do not keep it alive, and graphs may hold them longer."""
    reference = weakref.WeakMethod(method)

    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned | None:
        bound = reference()
        return None if bound is None else bound(*args, **kwargs)

    return call


def _evict_by(saves: list[weakref.ref[Saves]]) -> Callable[[ManagedStorage], None]:
    def evict(managed: ManagedStorage) -> None:
        alive = saves[0]()
        if alive is not None:
            alive.offload_soon(managed)

    return evict


for hook in (Engine._optimizer_steps, Engine._optimizer_stepped):
    keep_dynamo_out(hook)


def _free_what_is_over() -> None:
    """Frees what sessions left that nobody can enter again, as far as it was not possible at once."""
    end_what_is_over()
    _C.free_parked()


# Engines for later sessions, by their options: those of GPUs here, those of a TensorDevice on itself, as long as it
# lives. The last one is the one used last.
_of_gpus: dict[Hashable, object] = {}
_MOST_KEPT = 8
choosing = threading.Lock()


def engine_for(
    session: object, options: EngineOptions, key: Hashable | None, own: Engine | None, *, enters: bool
) -> Engine:
    """The engine of a session on this thread: `own`, which it had before, or that of earlier sessions with this key,
    or a new one. A session without a key shares none. With `enters` it is entered. See [Note: As one].

    The caller holds `choosing` from before it reads `own` until it has noted the engine, so that threads that enter one
    session first do not each make an engine for it."""
    engine = own or Engine(options) if key is None else _shared(session, options, key, own)
    if enters:
        engine.install(session)
    return engine


def _shared(session: object, options: EngineOptions, key: Hashable, own: Engine | None) -> Engine:
    if own is not None and own.saves.in_forked_child:
        return own  # passes everything through
    kept = options.device.kept_for_sessions if isinstance(options.device, TensorDevice) else _of_gpus
    earlier = kept.pop(key, None)
    free = [one for one in (own, earlier) if isinstance(one, Engine) and one.is_free_for(session)]
    engine = free[0] if free else Engine(options)
    kept[key] = earlier if isinstance(earlier, Engine) and not earlier.is_closed else engine
    while len(kept) > _MOST_KEPT:
        del kept[next(iter(kept))]
    return engine
