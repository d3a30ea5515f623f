"""Keeps the gradients of one optimizer's parameters on the host, from where backward makes them to where they are read.

[Note: Where a gradient is] A gradient is in the native field of its parameter or here. While it is here the field is
empty, so autograd takes the gradient of the next micro-batch for the first one. Our hook, which is called ahead of
those of others (gradient_hooks), fetches the sum and adds to it on the device, as autograd does. `parameter.grad`
fetches first (gradient_reads), and finds the whole sum, whatever is in the field. Nobody reads released memory: there
is no tensor that has it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from vdnn.bytesize import format_bytes
from vdnn.errors import VdnnError
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.backward_ends import call_after_backward, graph_task, in_backward, in_nested_backward
from vdnn.runtime.torch_internals.clipping import Passes, replace_passes
from vdnn.runtime.torch_internals.gradient_hooks import hear_behind, hear_first, hear_last, is_heard_last
from vdnn.runtime.torch_internals.gradient_reads import (
    holder_of,
    native_gradient,
    put_gradient_on,
    set_native_gradient,
    watch_gradient,
)
from vdnn.runtime.torch_internals.local_shards import (
    has_layout_of,
    is_offloaded_by_fsdp,
    is_sharded,
    local_part,
    with_local_part,
)
from vdnn.runtime.torch_internals.memory_holders import gradient_is_held
from vdnn.runtime.torch_internals.tensor_kinds import has_plain_storage, plain_part
from vdnn.runtime.torch_internals.tensor_swaps import watch_swaps
from vdnn.runtime.torch_internals.zero_grads import watch_zero_grads
from vdnn.runtime.training_state.gradient_copies import Change, GradientCopies, GradientOnHost
from vdnn.runtime.training_state.homes import device_of
from vdnn.runtime.training_state.host_tensor import HostTensor, host_tensor_for
from vdnn.runtime.training_state.interrupts import interrupts_wait
from vdnn.runtime.training_state.parameters.away_parameter import away_of
from vdnn.runtime.training_state.state_copies import StateCopies, StateCopy
from vdnn.runtime.training_state.state_tensors import has_lazy_bits, is_dense, is_whole


class Waiting(Protocol):
    """A step that waits has taken gradients over."""

    def before_read(self, parameter: torch.Tensor) -> None: ...
    def before_write(self, parameter: torch.Tensor) -> None: ...


class AwayGradients:
    """The gradients of one optimizer's parameters that have left. The session enters and leaves it."""

    def __init__(self) -> None:
        self._hosts: dict[int, HostTensor] = {}  # by id of the parameter
        self._changes: dict[int, tuple[Change, ...]] = {}  # that are noted, by id of the parameter
        self.copies = GradientCopies()
        self._undo: list[Callable[[], object]] = []
        self._min_bytes = 0
        self._stays: Callable[[torch.Tensor], bool] = lambda _: False
        self._entries = 0
        self.host_bytes = 0
        self.most_bytes = 0  # on the host at one time
        self.stayed_bytes = 0  # because memory of the host or a copy was refused
        self._parameters: list[torch.Tensor] = []
        # Parameters with a sum here, and parts of another one in their field, by id: the backward that makes these.
        self._in_parts: dict[int, int] = {}
        self._hooks: dict[int, list[Any]] = {}  # by id of the parameter: ours, and one behind others'
        self._reduced = ReducedGradients(self._parameters, self.bring_back, self.take_away)
        self.waiting: Waiting | None = None  # if steps of the optimizer are deferred
        self._read: deque[tuple[torch.Tensor, int]] = deque()  # with gradients that the program made return, and bytes

    # Sessions.

    def enter(
        self,
        optimizer: torch.optim.Optimizer,
        transport_for: Callable[[torch.device], Transport | None],
        min_bytes: int,
        passes: Passes,
        stays: Callable[[torch.Tensor], bool] = lambda _: False,
    ) -> None:
        """Gradients leave from now on, except those of parameters for which `stays` is True."""
        self._entries += 1
        if self._entries > 1:
            return
        self._min_bytes, self._stays = min_bytes, stays
        self._reduced = ReducedGradients(self._parameters, self.bring_back, self.take_away)
        try:
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                # Other classes have an attribute `grad` of their own, or are not plain memory.
                is_plain = type(parameter) in (torch.nn.Parameter, FakeTensor)  # the latter on a virtual machine
                if parameter.requires_grad and (is_plain or is_local_shard(parameter)):
                    self._watch(parameter, transport_for)
            self._undo.append(watch_zero_grads(self._drop))
            self._undo.append(watch_swaps())
            self._undo.append(self._reduced.watch())
            self._undo.append(replace_passes(passes))
        except BaseException:
            self.leave()
            raise

    def _watch(self, parameter: torch.Tensor, transport_for: Callable[[torch.device], Transport | None]) -> None:
        if not self.copies.open(parameter.device, transport_for):
            return
        self._parameters.append(parameter)
        handle = hear_first(parameter, self._accumulated)
        self._hooks[id(parameter)] = [handle]
        self._undo += (handle.remove, watch_gradient(parameter, self))

    def _drop(self, parameters: Iterable[torch.Tensor]) -> None:
        """The program drops the gradients of `parameters`, and does not read them."""
        for parameter in parameters:
            self._forget(parameter)

    def leave(self) -> None:
        self._entries -= 1
        if self._entries:
            return
        self.bring_back()
        for undo in self._undo:
            undo()
        self._undo, self._parameters = [], []
        self._reduced = ReducedGradients((), self.bring_back, self.take_away)
        self._hooks.clear()
        self.copies.close()

    def bring_back(self) -> None:
        """Returns all gradients to the device."""
        self._read.clear()
        self._in_parts.clear()
        for parameter in self._parameters:
            self.bring_back_one(parameter)
        self.copies.finish()

    # For the room that they take, see state_room.py.

    def bytes_away(self) -> list[tuple[int, int]]:
        """Each parameter whose gradient leaves: its id, and the bytes. Sharded ones are reduced into one storage."""
        return [
            (id(one), one.nbytes)
            for one in self._parameters
            if one.requires_grad and not is_sharded(one) and one.nbytes >= self._min_bytes and not self._stays(one)
        ]

    def window_bytes(self) -> int:
        """The most that gradients on their way take."""
        return sum(copies.window_bytes for copies in self.copies.opened())

    def take_out(self) -> None:
        """Gradients that stayed leave, except those that a backward adds to."""
        if not in_backward():
            self.take_away(self._parameters)

    # Reads and writes.

    def before_read(self, parameter: torch.Tensor) -> None:
        """Fetches the gradient if it is here. If that fails, it stays here.

        Those that were read before leave again as the window needs it, unless the program holds them: a loop over
        all gradients does not bring all of them back at one time."""
        if self.waiting is not None:
            self.waiting.before_read(parameter)
        if not self.has(parameter):
            return
        nbytes = self.bytes_of(parameter)
        self.bring_back_one(parameter)
        if in_backward():  # autograd may be about to add to any of them
            self._reduced.leave_later(parameter)
            return
        self._read = deque(read for read in self._read if read[0] is not parameter)
        self._read.append((parameter, nbytes))
        while len(self._read) > 1 and sum(one for _, one in self._read) > self.copies.slice_bytes(device_of(parameter)):
            self.take_away([self._read.popleft()[0]])

    def bring_back_one(self, parameter: torch.Tensor) -> None:
        if self.has(parameter):
            self._give(parameter, self._fetched(parameter))

    def _give(self, parameter: torch.Tensor, fetched: torch.Tensor) -> None:
        """Gives `parameter` the gradient that was here, in a sum with a part that a backward put into its field."""
        device = device_of(parameter)
        gradient, new = like(parameter, fetched), native_gradient(parameter)
        with interrupts_wait():
            if new is not None:
                new = new.to(device)  # if torch made it where the data of the parameter are
                # As autograd does: in place, unless the sum is part of a graph.
                gradient = gradient + new if torch.is_grad_enabled() and new.requires_grad else gradient.add_(new)
            set_native_gradient(parameter, gradient, device)
            self._forget(parameter)

    def write(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        device = device_of(parameter)
        if isinstance(gradient, torch.Tensor) and gradient.device == parameter.device != device:
            gradient = gradient.to(device)  # made like the parameter, which is on the host
        set_native_gradient(parameter, gradient, device)  # raises as torch does, and then nothing has changed
        if self.waiting is not None:
            self.waiting.before_write(parameter)
        self._forget(parameter)

    def peek(self, parameter: torch.Tensor) -> torch.Tensor | None:
        host = self._hosts.get(id(parameter))
        return native_gradient(parameter) if host is None else host.tensor

    def _fetched(self, parameter: torch.Tensor) -> torch.Tensor:
        moving = self.fetch([parameter])
        self.arrive([parameter], moving)
        return moving.tensors[0]

    # Copies that are only read, and changes that are noted, of gradients that are here.

    def has(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._hosts

    def bytes_of(self, parameter: torch.Tensor) -> int:
        """The bytes of the gradient of `parameter` that are here."""
        host = self._hosts.get(id(parameter))
        return 0 if host is None else host.nbytes

    def fetch(self, parameters: list[torch.Tensor]) -> StateCopy:
        """Issues copies to the device, for parameters of one device. They may be used after `arrive`."""
        return self.copies.fetch(device_of(parameters[0]), [self._hosts[id(one)] for one in parameters])

    def arrive(self, parameters: list[torch.Tensor], moving: StateCopy) -> None:
        """Makes the device wait for the copies, and makes the changes that are noted."""
        self.copies.arrive(moving, [self._changes.get(id(one), ()) for one in parameters])

    def put_back(self, parameters: list[torch.Tensor], moving: StateCopy) -> None:
        """Gives the parameters the gradients that were fetched for them."""
        self.arrive(parameters, moving)
        with interrupts_wait():
            for parameter, host, gradient in zip(parameters, moving.hosts, moving.tensors, strict=True):
                if self._hosts.get(id(parameter)) is host:  # nobody read or wrote it in between
                    self._give(parameter, gradient)
            moving.tensors.clear()

    def abandon(self, moving: StateCopy) -> None:
        """Releases copies that were not used."""
        self.copies.abandon(moving)

    def note(self, parameter: torch.Tensor, change: Change) -> None:
        """`change` is made to the gradient when it is next on the device."""
        self._changes[id(parameter)] = (*self._changes.get(id(parameter), ()), change)

    # For a step that waits.

    def hand_over(self, parameter: torch.Tensor) -> GradientOnHost | None:
        """Gives up the gradient of `parameter`. Its bytes count until `release`."""
        host = self._hosts.pop(id(parameter), None)
        return None if host is None else GradientOnHost(host, self._changes.pop(id(parameter), ()))

    def take_over(self, parameter: torch.Tensor, gradient: GradientOnHost) -> None:
        """The gradient was not used, and is that of `parameter` again, which has no other."""
        self._hosts[id(parameter)], self._changes[id(parameter)] = gradient

    def release(self, gradient: GradientOnHost) -> None:
        self._count(gradient.host, -gradient.host.nbytes)

    # Backward and step.

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Called by autograd after it wrote a gradient to the native field, ahead of the hooks of others."""
        if self._reduced.has(parameter) or is_sharded(parameter):
            self._sum(parameter)
            self._reduced.leave_later(parameter)
            return
        if self._awaits_parts(parameter):
            return  # further parts come first, as in one sum
        with interrupts_wait():
            self._sum(parameter)
            self._leave_behind_hooks(parameter)

    def _awaits_parts(self, parameter: torch.Tensor) -> bool:
        away = away_of(parameter)
        if away is None or not self.has(parameter):
            return False
        task, known = graph_task(), self._in_parts.get(id(parameter))
        if known == task:
            return True
        if not away.in_parts or not call_after_backward(lambda: self._last_part(parameter)):
            return False
        self._in_parts[id(parameter)] = task
        return True

    def _last_part(self, parameter: torch.Tensor) -> None:
        self._in_parts.pop(id(parameter), None)
        with interrupts_wait():
            self._sum(parameter)
            self.take_away([parameter])

    def _leave_behind_hooks(self, parameter: torch.Tensor) -> None:
        """Offloads the gradient of `parameter`. If others have hooks on it, this runs after theirs, which may read the
        gradient."""
        hooks = self._hooks[id(parameter)]
        if is_heard_last(parameter, hooks[-1]):
            if len(hooks) == 1:
                self.take_away([parameter])
            return
        if not parameter.requires_grad:
            pass  # it was frozen behind its forward, and torch takes no hook of it
        elif len(hooks) == 1:
            hooks.append(hear_behind(parameter, self._heard_by_all))
            self._undo.append(hooks[-1].remove)
        else:
            hear_last(parameter, hooks[-1])
        self._reduced.leave_later(parameter)  # this time

    def _heard_by_all(self, parameter: torch.Tensor) -> None:
        if id(parameter) not in self._in_parts and not self._reduced.has(parameter):
            self.take_away([parameter])

    def _sum(self, parameter: torch.Tensor) -> None:
        """Adds the gradient in the native field to the sum kept here, on the parameter's device."""
        put_gradient_on(parameter, device_of(parameter))
        if native_gradient(parameter) is not None:
            self.bring_back_one(parameter)

    def take_away(self, parameters: Iterable[torch.Tensor]) -> None:
        """Offloads the gradients of `parameters`, except gradients that somebody else holds."""
        for parameter in parameters:
            device = device_of(parameter)
            copies = self.copies.of(device)
            if copies is None or holder_of(parameter) is not self or id(parameter) in self._hosts:
                continue
            if self._stays(parameter):
                continue
            if not may_leave(parameter, device, self._min_bytes) or gradient_is_held(parameter, self._parameters):
                continue
            gradient = whole_gradient(parameter)
            host = self._host_with(gradient, copies)
            if host is None:
                self.stayed_bytes += gradient.nbytes
                continue
            with interrupts_wait():
                self._hosts[id(parameter)] = host
                set_native_gradient(parameter, None)
                self._count(host, host.nbytes)

    @staticmethod
    def _host_with(gradient: torch.Tensor, copies: StateCopies) -> HostTensor | None:
        """A host tensor that has the gradient once its copy is over; None if the host refuses."""
        try:
            host = host_tensor_for(gradient, copies.transport)
        except (VdnnError, MemoryError):
            return None
        return host if copies.leave([gradient], [host]) else None

    def _forget(self, parameter: torch.Tensor) -> None:
        """The gradient here is no longer that of `parameter`."""
        host = self._hosts.pop(id(parameter), None)
        self._changes.pop(id(parameter), None)
        if host is not None:
            self._count(host, -host.nbytes)

    def _count(self, host: HostTensor, nbytes: int) -> None:
        host.transport.state_bytes += nbytes
        self.host_bytes += nbytes
        self.most_bytes = max(self.most_bytes, self.host_bytes)

    def lines(self, name: str) -> list[str]:
        copies = self.copies
        if not copies.to_host_bytes and not self.stayed_bytes:
            return []
        line = (
            f"  gradients of {name}: at most {format_bytes(self.most_bytes)} on the host; "
            f"{format_bytes(copies.to_host_bytes)} left the device and {format_bytes(copies.to_device_bytes)} returned"
        )
        stayed = f"; {format_bytes(self.stayed_bytes)} stayed, because memory of the host or a copy was refused"
        return [line + stayed if self.stayed_bytes else line]


def gradient_anywhere(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of `parameter` on the device, or its host tensor, whose copy may not be complete. For its metadata
    only: shape, dtype, layout."""
    holder = holder_of(parameter)
    return parameter.grad if holder is None else holder.peek(parameter)


# Says which part of a gradient leaves: all of it, or the local part if it is a DTensor.
#
# FSDP2 reduces the gradients of a module into one storage, of which each is a view. Such a view is copied on the device
# first, since a copy to the host takes whole storages. The storage is released when the last of its gradients has left.


def is_local_shard(parameter: torch.Tensor) -> bool:
    """True for a DTensor whose local part is plain memory of the device of its mesh."""
    return is_sharded(parameter) and plain_part(parameter) is not None and not is_offloaded_by_fsdp(parameter)


def may_leave(parameter: torch.Tensor, device: torch.device, min_bytes: int) -> bool:
    """True if the parameter has a gradient on `device` that may leave. The gradient of a DTensor must be divided as
    that is."""
    gradient = native_gradient(parameter)
    if gradient is None or not has_layout_of(gradient, parameter):
        return False
    local = local_part(gradient)
    is_alone = _is_plain_part(local, device) if is_sharded(gradient) else is_whole(local, device)
    return is_alone and local.nbytes >= min_bytes


def _is_plain_part(tensor: torch.Tensor, device: torch.device) -> bool:
    is_there = tensor.device == device and has_plain_storage(tensor) and not tensor.requires_grad
    return is_there and tensor.dim() > 0 and tensor.nbytes > 0 and not has_lazy_bits(tensor) and is_dense(tensor)


def whole_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient, or its local part, in a storage of its own."""
    gradient = native_gradient(parameter)
    if gradient is None:
        raise RuntimeError("expected the gradient that may leave, got none")
    local = local_part(gradient)
    return local if is_whole(local, local.device) else local.clone(memory_format=torch.preserve_format)


def like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """`gradient` itself, or a DTensor around it if the parameter is one."""
    return with_local_part(parameter, gradient) if is_sharded(parameter) else gradient  # type: ignore[arg-type]


# Lets gradients that DistributedDataParallel reduces leave once they are reduced.
#
# [Note: When DDP has reduced] DDP copies a gradient into its bucket behind the hook in which gradients leave otherwise,
# and writes the reduced one where it was in a callback at the end of the backward. It queues that callback with the
# last bucket. A callback that was queued before runs before it: ours queues a second one, which runs behind DDP's. This
# holds for every communication hook, under no_sync(), and with a static graph, whose first reduction is in such a
# callback. FSDP2 calls the hooks of a shard while it still holds what it reduced, so those leave behind the backward,
# too.

Take = Callable[[Iterable[torch.Tensor]], object]


class ReducedGradients:
    """Those of `parameters` that DDP reduces, and those whose reduced gradient has not left. `bring_back` and
    `take_away` move gradients."""

    def __init__(self, parameters: Sequence[torch.Tensor], bring_back: Callable[[], object], take_away: Take) -> None:
        self._parameters = parameters
        self._bring_back = bring_back
        self._take_away = take_away
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._ids: set[int] = set()  # of parameters
        self._waiting: dict[int, torch.Tensor] = {}  # parameters by id
        self._task: int | None = None  # the backward behind which the waiting ones leave

    def watch(self) -> Callable[[], object]:
        """Is notified of calls of modules under DDP from now on. Returns what undoes it."""
        handle: Any = torch.nn.modules.module.register_module_forward_pre_hook(self._before)
        return handle.remove  # type: ignore[no-any-return]

    def _before(self, module: torch.nn.Module, args: object) -> None:
        if not isinstance(module, DistributedDataParallel):
            return
        if module not in self._modules:
            self._modules.add(module)
            self._ids.update(map(id, module.parameters()))
        may_skip = module.find_unused_parameters or module.static_graph
        if may_skip and torch.is_grad_enabled() and module.require_backward_grad_sync:
            self._bring_back()  # DDP reduces the sum of a parameter that this backward does not reach, too
            self._waiting.update((id(one), one) for one in self._parameters if self.has(one))

    def has(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def leave_later(self, parameter: torch.Tensor) -> None:
        """Offloads the gradient of `parameter` after the running backward."""
        self._waiting[id(parameter)] = parameter
        task = graph_task()
        if task != self._task and call_after_backward(self._behind_others):
            self._task = task

    def _behind_others(self) -> None:
        call_after_backward(self._leave)

    def _leave(self) -> None:
        if in_nested_backward():
            return  # a checkpoint's: the reduction belongs to the outer one
        self._task = None
        waiting, self._waiting = list(self._waiting.values()), {}
        self._take_away(waiting)
