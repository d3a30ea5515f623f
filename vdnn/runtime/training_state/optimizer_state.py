"""Keeps the state of one optimizer on the host between its steps, while a session manages it.

[Note: Where the state is] Between steps every tensor in `optimizer.state` that may leave is a host tensor: readable,
and always the newest. A step on the device has it there, slice by slice, and returns when the last one is on the host.
Left alone by its session, the state stays on the host until the optimizer steps outside of one or the session is
closed: then all of it returns to the device.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vdnn.errors import VdnnError
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals import forks
from vdnn.runtime.torch_internals.optimizer_steps import replace_step
from vdnn.runtime.training_state.away_gradients import AwayGradients, gradient_anywhere
from vdnn.runtime.training_state.cpu_steps import CpuSteps
from vdnn.runtime.training_state.deferred.deferral import Deferral
from vdnn.runtime.training_state.device_steps import DeviceSteps, Gradients
from vdnn.runtime.training_state.homes import device_of, is_managed
from vdnn.runtime.training_state.host_tensor import HostTensor, host_tensor_for
from vdnn.runtime.training_state.interrupts import interrupts_wait
from vdnn.runtime.training_state.moved_bytes import MovedBytes
from vdnn.runtime.training_state.refusals import require_sliceable
from vdnn.runtime.training_state.sliced_step import SlicedStep, interruption_message
from vdnn.runtime.training_state.slices import Slice, parameters_of, slices_of
from vdnn.runtime.training_state.state_copies import LARGEST_WINDOW_BYTES, StateCopies
from vdnn.runtime.training_state.state_tensors import (
    TensorPlace,
    bytes_of,
    bytes_of_first_state,
    is_held,
    lines_of_held,
    lines_of_other_classes,
    movable,
    places_in,
)
from vdnn.user_warnings import warn

TransportFor = Callable[[torch.device], Transport | None]
Optimizer = torch.optim.Optimizer


class OptimizerState:
    """The state of `optimizer`. One for each optimizer, see `state_of`; it lives as long as the optimizer does."""

    def __init__(self, optimizer: Optimizer) -> None:
        require_sliceable(optimizer)
        self.name = type(optimizer).__name__
        self.number = next(_numbers)
        self._reference = weakref.ref(optimizer, self._gone)
        self.moved = MovedBytes()
        self.gradients = AwayGradients()
        self.deferral: Deferral | None = None  # if the session that manages it defers steps
        self.owner: object | None = None  # the session that manages it now
        self._entries = 0
        self._transport_for: TransportFor | None = None
        self._min_bytes = 0
        self._stays: Callable[[torch.Tensor], bool] = lambda _: False
        self._before_step: Callable[[], object] = lambda: None
        self._copies: dict[torch.device, StateCopies] = {}
        self._hosts: dict[int, HostTensor] = {}  # by id of the tensor, which the value holds
        self._held: dict[int, dict[str, int]] = {}  # bytes that the program holds as well, by parameter's id and name
        self._left_from: set[tuple[int, Any]] = set()  # parameters' ids and names of tensors that have left
        self._reserved: dict[Transport, int] = {}  # host bytes by transport
        self._loading: LoadsInParts | None = None
        self._undo: Callable[[], None] | None = None
        self._retry: Any = None  # the handle of a hook that takes out what was held as it was loaded
        self._forks = forks.count

    @property
    def optimizer(self) -> Optimizer:
        if (optimizer := self._reference()) is None:
            raise VdnnError("the optimizer of this session is gone. Open a session with the one that trains now.")
        return optimizer

    @property
    def is_gone(self) -> bool:
        """True if the program has let go of the optimizer, as where another one takes its place inside the session."""
        return self._reference() is None

    # Sessions.

    def managed_by(
        self,
        session: object,
        transport_for: TransportFor,
        min_bytes: int,
        *,
        on_cpu: bool = False,
        stays: Callable[[torch.Tensor], bool] = lambda _: False,
        before_step: Callable[[], object] = lambda: None,
    ) -> None:
        """`session` manages the state from now on. It leaves the device, except the state of parameters for which
        `stays` is True. `on_cpu`: it steps on the CPU. `before_step` is called below torch's hooks."""
        optimizer = self.optimizer
        if self.owner is not None and self.owner is not session:
            raise VdnnError(
                f"this {type(optimizer).__name__} is managed by another session, which has not been left. One session "
                "manages the state of an optimizer at a time: give optimizer= to one of them."
            )
        self.owner, self._entries = session, self._entries + 1
        self._transport_for, self._min_bytes, self._stays = transport_for, min_bytes, stays
        self._before_step = before_step
        self.moved.on_cpu = on_cpu
        try:
            if self._undo is None:
                self._undo = replace_step(optimizer, self._step)
                vars(optimizer)["__deepcopy__"] = self._deepcopy
            if self._loading is None:
                self._loading = LoadsInParts(optimizer, self.take_out_part, self._take_out_loaded, self.slice_bytes)
            self.take_out()
        except BaseException:
            self.left()
            raise

    def defer_steps(self) -> None:
        """The session that manages the state defers steps until it is left."""
        if self.deferral is None:
            self.deferral = Deferral(self.optimizer, self, self._hosts).entered()

    def left(self) -> None:
        """Called when a session that manages the state ends. The last one runs the steps that are still deferred."""
        self._entries -= 1
        if self._entries:
            return
        try:
            if self.deferral is not None:
                self.deferral.leave()
        finally:
            self.deferral = None
            self._left()

    def _left(self) -> None:
        self.owner = self._transport_for = None
        self._before_step = lambda: None
        self._stop_retrying()
        if self._loading is not None:
            self._loading.remove()
            self._loading = None
        if not self._hosts:
            self._let_go()

    def bring_back(self) -> None:
        """Returns all state to the device, or to memory that is not pinned. Then the optimizer steps by itself."""
        optimizer = self._reference()
        if optimizer is None:
            return
        refused_bytes = self._put_on_device(optimizer)
        for host in self._hosts.values():
            host.outlive_the_memory()
        self._forget_unused(optimizer)
        self._let_go()
        if refused_bytes:
            warn(
                f"{refused_bytes} bytes of the state of {self.name} stay on the host, because the device has no room "
                "for them. Step it inside vdnn.offload(optimizer=...), or save its state_dict()."
            )

    def _put_on_device(self, optimizer: Optimizer) -> int:
        """Returns the bytes that the device refused."""
        refused_bytes = 0
        # Also of parameters in no group. Some optimizers keep what belongs to no parameter under a name.
        states: dict[Any, Any] = optimizer.state
        for parameter in [one for one in states if isinstance(one, torch.Tensor)]:
            for place in list(places_in(states[parameter])):
                if id(place.tensor) not in self._hosts and not self._is_stray(parameter, place):
                    continue
                try:
                    place.put(copied_to_device(place.tensor, device_of(parameter)))
                except (RuntimeError, MemoryError):  # torch.OutOfMemoryError is a RuntimeError, and so is a lost device
                    refused_bytes += place.tensor.nbytes
                    place.put(place.tensor.clone())
        return refused_bytes

    def _let_go(self) -> None:
        """The optimizer steps by itself again, unless a session still manages its state."""
        self._copies = {}
        if self.owner is None and self._undo is not None:
            self._undo()
            optimizer = self._reference()
            if optimizer is not None:
                vars(optimizer).pop("__deepcopy__", None)
            self._undo = self._transport_for = None

    def _deepcopy(self, memo: dict[int, Any]) -> Optimizer:
        return copy_of(self.optimizer, memo, self._hosts)

    # Where the state is.

    def _at_host(self, optimizer: Optimizer, parameter: torch.Tensor) -> list[TensorPlace]:
        """The tensors in the state of `parameter` that are host tensors of ours."""
        state = optimizer.state.get(parameter)
        return [place for place in places_in(state) if id(place.tensor) in self._hosts]

    def _is_stray(self, parameter: torch.Tensor, place: TensorPlace) -> bool:
        """True for a tensor on the host that the program made of one that is there because of us, such as zeros like
        it, and put into its place. In plain PyTorch it is on the device."""
        tensor = place.tensor
        is_elsewhere = tensor.device.type == "cpu" and device_of(parameter).type != "cpu" and tensor.dim() > 0
        return is_elsewhere and id(tensor) not in self._hosts and (id(parameter), place.key) in self._left_from

    def _copies_for(self, device: torch.device | None) -> StateCopies | None:
        if device is None or self._transport_for is None:
            return None
        copies = self._copies.get(device)
        transport = self._transport_for(device)
        if transport is None:
            return None
        if copies is None or copies.transport is not transport:
            copies = self._copies[device] = StateCopies(transport)
        return copies

    def slice_bytes(self) -> int:
        """The most state that a slice has, unless a single parameter has more: two are on the device at one time."""
        devices = {device_of(parameter) for parameter in parameters_of(self.optimizer)}
        windows = [copies.window_bytes for one in devices if (copies := self._copies_for(one))]
        return max(1, min(windows, default=LARGEST_WINDOW_BYTES) // 2)

    def bytes_moving(self, parameter: torch.Tensor) -> int:
        """The bytes that come to the device for the step of `parameter`."""
        optimizer = self.optimizer
        if (gradient := gradient_anywhere(parameter)) is None:
            return 0
        if self.moved.on_cpu:
            return parameter.nbytes + gradient.nbytes
        away_bytes = self.gradients.bytes_of(parameter) + (parameter.nbytes if is_managed(parameter) else 0)
        state = optimizer.state.get(parameter)
        if state and self._stays(parameter):  # slices are as if it moved: a step needs memory of its own for a slice
            return away_bytes + bytes_of(place.tensor for place in movable(state, parameter, self._min_bytes))
        if state:
            return away_bytes + bytes_of(place.tensor for place in self._at_host(optimizer, parameter))
        return away_bytes + bytes_of_first_state(parameter, self._min_bytes)

    def _slices(self, optimizer: Optimizer, deferred: dict[int, torch.Tensor]) -> list[Slice]:
        """Slices of the parameters that are stepped without deferral."""
        groups: Any = optimizer.param_groups
        if deferred:
            groups = [{"params": [one for one in group["params"] if id(one) not in deferred]} for group in groups]
        slices = slices_of(groups, self.bytes_moving, self.slice_bytes())
        if not deferred:
            return slices
        return [part for part in slices if any(part.parameters.values())]

    def _forget_unused(self, optimizer: Optimizer) -> None:
        """Returns the memory of host tensors that are no longer in the state."""
        there = {id(place.tensor) for state in optimizer.state.values() for place in places_in(state)}
        for identity in [one for one in self._hosts if one not in there]:
            self._hosts.pop(identity)
        self._count()

    def _gone(self, _: object) -> None:
        """The optimizer is gone, and its state with it."""
        self._hosts.clear()
        self._count()

    def _count(self) -> None:
        reserved: dict[Transport, int] = dict.fromkeys(self._reserved, 0)
        for host in self._hosts.values():
            reserved[host.transport] = reserved.get(host.transport, 0) + host.nbytes
        for transport, nbytes in reserved.items():
            transport.state_bytes += nbytes - self._reserved.get(transport, 0)
        self._reserved = {transport: nbytes for transport, nbytes in reserved.items() if nbytes}
        self.moved.host_bytes = sum(reserved.values())

    def take_out(self) -> None:
        """Moves the state that is on the device, after it was loaded or made outside of the session. Blocks."""
        if self.is_gone:
            return
        self.take_out_part()
        self._forget_unused(self.optimizer)

    def _take_out_loaded(self) -> None:
        """The same after a load. Torch does not copy tensors of a dict that are on the device already, and the caller
        may still hold the dict. Before the next call of a module, tensors that nobody holds any more are offloaded."""
        self.take_out()
        if not self._held:
            return

        def again(module: torch.nn.Module, args: object) -> None:
            if torch.compiler.is_compiling():
                return
            self._stop_retrying()
            if self.owner is not None:
                self.take_out()

        self._stop_retrying()
        self._retry = torch.nn.modules.module.register_module_forward_pre_hook(again)

    def _stop_retrying(self) -> None:
        retry, self._retry = self._retry, None
        if retry is not None:
            retry.remove()

    def take_out_part(self) -> None:
        """The same, while `optimizer.state` is a part of the state: other host tensors of ours may be elsewhere."""
        optimizer = self.optimizer
        self.moved.stayed_bytes = 0
        for parameter in parameters_of(optimizer):
            put_where_it_computes(optimizer, parameter)
            copies = self._copies_for(device_of(parameter))
            if copies is not None:
                self._take_over(optimizer, parameter, copies)
                self._leave(optimizer, [parameter], copies, {})
        self._finish()

    def _take_over(self, optimizer: Optimizer, parameter: torch.Tensor, copies: StateCopies) -> None:
        """Moves state out of memory that another device of the core has pinned, for a session that shares no engine
        with this one: a device copies only from and to memory of its own. The host copies it; nothing is under way."""
        for place in self._at_host(optimizer, parameter):
            before = self._hosts[id(place.tensor)]
            if before.transport.device is copies.transport.device:
                continue
            try:
                made = host_tensor_for(place.tensor, copies.transport)
            except (VdnnError, MemoryError):
                self.moved.stayed_bytes += before.nbytes
                place.put(copied_to_device(place.tensor, device_of(parameter)))
                del self._hosts[id(place.tensor)]
                before.outlive_the_memory()
                continue
            copies.settle_uses(made)
            self._hosts[id(place.tensor)] = before.moved_into(made)

    def _return_what_is_in_two_places(self, optimizer: Optimizer) -> None:
        """Host tensors that the program has put into a second place of the state return to the device: slices would
        make a tensor for each place, where plain PyTorch has one."""
        if not any(sys.getrefcount(host.tensor) > _IN_ONE_PLACE for host in self._hosts.values()):
            return
        found: dict[int, list[tuple[torch.Tensor, TensorPlace]]] = {}
        for parameter, state in optimizer.state.items():
            for place in places_in(state):
                if id(place.tensor) in self._hosts:
                    found.setdefault(id(place.tensor), []).append((parameter, place))
        for identity, several in found.items():
            if len(several) > 1:
                (parameter, first), *_ = several
                tensor = copied_to_device(first.tensor, device_of(parameter))
                for _, place in several:
                    place.put(tensor)
                del self._hosts[identity]

    def is_in(self, transports: Collection[Transport]) -> bool:
        """True if some of the state, or of the gradients, is in memory of these."""
        opened = [copies.transport for copies in (*self._copies.values(), *self.gradients.copies.opened())]
        return any(one in transports for one in (*opened, *(host.transport for host in self._hosts.values())))

    # For the room that it takes, see state_room.py.

    def bytes_away(self) -> list[tuple[int, int]]:
        """Each parameter with state on the host: its id, and the bytes."""
        optimizer = self._reference()
        if optimizer is None:
            return []
        found = [
            (id(one), bytes_of(place.tensor for place in self._at_host(optimizer, one)))
            for one in parameters_of(optimizer)
        ]
        return [(identity, nbytes) for identity, nbytes in found if nbytes]

    def crossed(self) -> tuple[int, int]:
        """The bytes of state and gradients that have crossed the link in all steps, and the time that compute has
        waited for them."""
        moved, gradients = self.moved, self.gradients.copies
        crossed_bytes = (
            moved.to_device_bytes + moved.to_host_bytes + gradients.to_device_bytes + gradients.to_host_bytes
        )
        return crossed_bytes, moved.waited_ns + gradients.waited_ns

    def may_stay(self) -> bool:
        return self.deferral is None and not self.moved.on_cpu

    # The step.

    def _step(self, own_step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        optimizer = self.optimizer
        if self.owner is None and self._forks == forks.count:
            self.bring_back()
        if self.owner is None or self._forks != forks.count:
            return own_step(*args, **kwargs)
        self._before_step()
        if self.deferral is not None:
            self.deferral.settle()
        cpu = CpuSteps(optimizer, self._copies_for, self._hosts, self._min_bytes) if self.moved.on_cpu else None
        sliced = (cpu.sliced if cpu else functools.partial(SlicedStep, optimizer))(own_step, args, kwargs)
        if cpu is None:
            self._return_what_is_in_two_places(optimizer)
        deferral = None if sliced.has_closure else self.deferral
        deferred = {} if deferral is None else deferral.choose()
        slices = self._slices(optimizer, deferred)
        self.moved.stayed_bytes = 0
        # The host memory of the gradient that backward made last is then free for it once its slice has used it.
        self.gradients.copies.release_what_left(only_if_over=False)
        with interrupts_wait():
            self._step_slices(optimizer, sliced, slices, cpu)
            if deferral is not None:
                deferral.defer(sliced, deferred, sum(len(part.all_parameters()) for part in slices))
        self.moved.stayed_bytes += 0 if cpu is None else cpu.stayed_bytes
        self.moved.steps += 1
        return sliced.loss

    def _step_slices(self, optimizer: Optimizer, sliced: SlicedStep, slices: list[Slice], cpu: CpuSteps | None) -> None:
        stepped = 0
        device = self.device_steps(self.gradients)
        try:
            parts = (cpu or device).steps(sliced, slices)
            for part in parts:
                stepped += len(part.all_parameters())
            sliced.end()
            self._finish()
        except BaseException as error:
            device.give_up()
            with contextlib.suppress(VdnnError):  # the device is lost, which the first error says
                self._finish()
            if not stepped or not isinstance(error, Exception):
                raise
            total = sum(len(part.all_parameters()) for part in slices)
            raise VdnnError(interruption_message(optimizer, stepped, total, error)) from error
        finally:
            self._forget_unused(optimizer)

    def device_steps(self, gradients: Gradients) -> DeviceSteps:
        leave = functools.partial(self._leave, self.optimizer)
        release = functools.partial(self.release_what_left, only_if_over=False)
        return DeviceSteps(self.optimizer, self._copies_for, self._hosts, gradients, leave, self._is_stray, release)

    def _leave(
        self, optimizer: Optimizer, parameters: list[torch.Tensor], copies: StateCopies, fetched: dict[int, HostTensor]
    ) -> None:
        """Issues copies of the state of `parameters` to the host, and puts host tensors in its place. `fetched`: the
        host tensors from which state was fetched, by id of the tensor on the device."""
        places: list[TensorPlace] = []
        hosts: list[HostTensor] = []
        transport = copies.transport
        for parameter in parameters:
            stays, held = self._stays(parameter), dict[str, int]()
            if stays and not fetched:
                continue
            for place in movable(optimizer.state.get(parameter), parameter, self._min_bytes):
                if id(place.tensor) in self._hosts:
                    continue
                host = fetched.get(id(place.tensor))
                if stays and (host is None or not host.is_held):  # who holds the host tensor sees each step
                    continue
                if is_held(place):
                    held[str(place.key)] = place.tensor.untyped_storage().nbytes()
                    continue
                if host is None:
                    try:
                        host = host_tensor_for(place.tensor, transport)
                    except (VdnnError, MemoryError):
                        self.moved.stayed_bytes += place.tensor.untyped_storage().nbytes()
                        continue
                places.append(place)
                hosts.append(host)
                self._left_from.add((id(parameter), place.key))
            self._note_held(parameter, held)
        if not places:
            return
        if not copies.leave([place.tensor for place in places], hosts):
            self.moved.stayed_bytes += bytes_of(place.tensor for place in places)
            return
        for place, host in zip(places, hosts, strict=True):
            self._hosts[id(host.tensor)] = host
            place.put(host.tensor)

    def _note_held(self, parameter: torch.Tensor, held: dict[str, int]) -> None:
        if held:
            self._held[id(parameter)] = held
        else:
            self._held.pop(id(parameter), None)

    def lines(self) -> list[str]:
        """The lines of the report."""
        lines = self.moved.lines(self.name)
        optimizer = self._reference()
        if optimizer is not None:
            lines += lines_of_other_classes(optimizer) + lines_of_held(optimizer, self._held)
        return lines + self.gradients.lines(self.name)

    # Deferred steps.

    def release_what_left(self, *, only_if_over: bool) -> None:
        self.gradients.copies.release_what_left(only_if_over=only_if_over)
        for copies in self._copies.values():
            copies.release_what_left(only_if_over=only_if_over)

    def finish_copies(self) -> None:
        """Blocks until all state is on the host."""
        self._finish()
        self._forget_unused(self.optimizer)

    def _finish(self) -> None:
        self.gradients.copies.finish()
        for copies in self._copies.values():
            self.moved.finish(copies)


def _references_in_one_place() -> int:
    """References to a host tensor that one place of a state has."""
    host, state = types.SimpleNamespace(tensor=torch.zeros(1)), dict[str, Any]()
    state["alone"] = host.tensor
    return sys.getrefcount(host.tensor)


_numbers = itertools.count()  # in the order in which sessions were first given the optimizers
_IN_ONE_PLACE = _references_in_one_place()
_states: weakref.WeakKeyDictionary[Optimizer, OptimizerState] = weakref.WeakKeyDictionary()


def state_of(optimizer: Optimizer) -> OptimizerState:
    """The state of `optimizer`, the same for all sessions. Raises if its step cannot run in slices."""
    state = _states.get(optimizer)
    if state is None:
        state = _states[optimizer] = OptimizerState(optimizer)
    return state


# copy.deepcopy of an optimizer whose state is on the host: the copy is plain, with its state on the device.


def copy_of(
    optimizer: torch.optim.Optimizer,
    memo: dict[int, Any],
    on_host: Container[int],
) -> torch.optim.Optimizer:
    """Does what copy.deepcopy does, but for the tensors whose ids are in `on_host`, which go to the device."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    for parameter, state in optimizer.state.items():
        for place in places_in(state):
            if id(place.tensor) in on_host:
                held = place.tensor if place.whole is None else place.whole
                memo[id(held)] = place.holding(copied_to_device(place.tensor, parameter.device))
    made.__setstate__(copy.deepcopy(optimizer.__getstate__(), memo))
    return made


def copied_to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
    return tensor if isinstance(host, FakeTensor) else tensor.copy_(host)


# Loads a saved state in parts, so that the device never holds all of it.
#
# load_state_dict() makes every tensor on the device of its parameter, which is the room that a session does not have.
# Here it runs once for each part of the state, and each part leaves before the next one is loaded. Hooks run once.

_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


class LoadsInParts:
    """Watches `load_state_dict` of one optimizer. `take_out_part` moves the state that is loaded so far to the host,
    and `take_out` moves the rest once all of it is loaded."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        take_out_part: Callable[[], None],
        take_out: Callable[[], None],
        part_bytes: Callable[[], int],
    ) -> None:
        self._take_out_part = take_out_part
        self._take_out = take_out
        self._part_bytes = part_bytes
        self._loaded: list[tuple[torch.Tensor, Any]] = []
        self._handles = (
            optimizer.register_load_state_dict_pre_hook(self._before),
            optimizer.register_load_state_dict_post_hook(self._after, prepend=True),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any] | None:
        saved = self._changed_by_later_hooks(optimizer, saved)
        *parts, last = list(_parts_of(saved.get("state", {}), self._part_bytes())) or [{}]
        self._loaded = []
        before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
        hooks = {name: getattr(optimizer, name) for name in _HOOKS}
        try:
            vars(optimizer).update({name: OrderedDict() for name in _HOOKS})
            for part in parts:
                torch.optim.Optimizer.load_state_dict(optimizer, {**saved, "state": part})
                self._take_out_part()
                self._loaded += optimizer.state.items()
        except BaseException:
            vars(optimizer).update(before)
            self._loaded = []
            raise
        finally:
            vars(optimizer).update(hooks)
        return {**saved, "state": last}

    def _changed_by_later_hooks(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Runs the hooks that were registered after ours, since all of the state is here only now. Torch, which is
        about to call them, finds hooks in their place that do nothing, once."""
        hooks: OrderedDict[int, Any] = getattr(optimizer, _HOOKS[0])
        numbers = list(hooks)
        later = numbers[numbers.index(self._handles[0].id) + 1 :]
        for number in later:
            changed = hooks[number](optimizer, saved)
            saved = saved if changed is None else changed
        for number in later:
            hooks[number] = functools.partial(_put_back, hooks, number, hooks[number])
        return saved

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        loaded, self._loaded = self._loaded, []
        rest = list(optimizer.state.items())
        optimizer.state.clear()
        optimizer.state.update(loaded + rest)
        self._take_out()


def _put_back(hooks: OrderedDict[int, Any], number: int, hook: Any, *_: object) -> None:
    hooks[number] = hook


def put_where_it_computes(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Moves loaded state of a parameter that is on the host to the device where it computes, as torch does for one that
    is there: all tensors, but counts of steps only for optimizers that have them on the device."""
    if not is_managed(parameter):
        return
    device = device_of(parameter)
    group = next(one for one in optimizer.param_groups if any(parameter is other for other in one["params"]))
    has_counts_there = bool(group.get("capturable") or group.get("fused"))
    for place in places_in(optimizer.state.get(parameter)):
        if place.tensor.device == parameter.device != device and (place.key != "step" or has_counts_there):
            place.put(place.tensor.to(device))


def _parts_of(state: dict[Any, Any], limit_bytes: int) -> Iterator[dict[Any, Any]]:
    part: dict[Any, Any] = {}
    part_bytes = 0
    for name, value in state.items():
        nbytes = sum(place.tensor.nbytes for place in places_in(value))
        if part and part_bytes + nbytes > limit_bytes:
            yield part
            part, part_bytes = {}, 0
        part[name] = value
        part_bytes += nbytes
    if part:
        yield part
