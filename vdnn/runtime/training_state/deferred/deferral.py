"""Defers the steps of one optimizer: each slice is stepped ahead of the first module that needs its parameters.

[Note: Nobody sees a deferred step] A deferred step is exact if nobody reads or writes its parameters, gradients and
state before it runs. If the program holds one of these tensors in a way of its own, that step runs at once
(memory_holders). All others can only be reached by name: functions that get a parameter, `parameter.grad` and
`optimizer.state` run the step before they read.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vdnn.errors import VdnnError
from vdnn.runtime.torch_internals import forks
from vdnn.runtime.torch_internals.backward_ends import in_backward
from vdnn.runtime.torch_internals.gradient_reads import holder_of, native_gradient, set_native_gradient, watch_gradient
from vdnn.runtime.torch_internals.memory_holders import gradient_is_held, memory_is_held
from vdnn.runtime.torch_internals.optimizer_reads import watch_state
from vdnn.runtime.torch_internals.parameter_guard import guard, guard_no_longer
from vdnn.runtime.torch_internals.tensor_kinds import is_jit_traced, outside_of_transforms, transform_level
from vdnn.runtime.torch_internals.tensor_swaps import watch_swaps
from vdnn.runtime.torch_internals.zero_grads import watch_zero_grads
from vdnn.runtime.training_state.away_gradients import AwayGradients, gradient_anywhere
from vdnn.runtime.training_state.deferred.deferred_step import DeferredStep
from vdnn.runtime.training_state.deferred.taken_gradients import TakenGradients
from vdnn.runtime.training_state.device_steps import DeviceSteps, Gradients
from vdnn.runtime.training_state.homes import is_managed
from vdnn.runtime.training_state.host_tensor import HostTensor
from vdnn.runtime.training_state.interrupts import interrupts_wait
from vdnn.runtime.training_state.moved_bytes import MovedBytes
from vdnn.runtime.training_state.sliced_step import SlicedStep
from vdnn.runtime.training_state.slices import is_one_decision, parameters_of, slices_in_order
from vdnn.runtime.training_state.state_tensors import state_is_held, states_are_held


class Copies(Protocol):
    """An optimizer's state, as far as its deferred steps need it."""

    moved: MovedBytes
    gradients: AwayGradients

    def bytes_moving(self, parameter: torch.Tensor) -> int: ...
    def slice_bytes(self) -> int: ...
    def device_steps(self, gradients: Gradients) -> DeviceSteps: ...
    def release_what_left(self, *, only_if_over: bool) -> None: ...
    def finish_copies(self) -> None: ...


class Deferral:
    """The deferred steps of `optimizer`, while a session asks for them. `hosts`: ids of its state's host tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer, copies: Copies, hosts: dict[int, HostTensor]) -> None:
        self._optimizer = optimizer
        self._copies = copies
        self._hosts = hosts
        self._pending: DeferredStep | None = None
        self._is_unsettled = False  # copies of a step that was deferred may be under way
        self._is_busy = False
        self._states_before = 0  # parameters that had a state as the last step was called
        self._numbers: dict[int, int] = {}  # the order of the parameters in that step, by id
        self._lock = threading.RLock()
        self._undo: list[Callable[[], object]] = []
        self._forks = forks.count
        self._counts = copies.moved
        self.order = ModuleCallOrder(self._before_module, self._behind_model)

    # Sessions.

    def entered(self) -> Deferral:
        try:
            self._enter()
        except BaseException:
            self.leave()
            raise
        return self

    def _enter(self) -> None:
        optimizer = self._optimizer
        _refuse_several_ranks()
        self._copies.gradients.waiting = self
        self._undo.append(self._forget_gradients)
        self._undo.append(watch_state(optimizer, self.settle))
        self._undo.append(watch_zero_grads(self._drop))
        self._undo.append(watch_swaps())
        self._watch(parameters_of(optimizer))
        self.order.enter()
        self._undo.append(self.order.leave)

    def _forget_gradients(self) -> None:
        self._copies.gradients.waiting = None

    def _watch(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if type(parameter) is torch.nn.Parameter and holder_of(parameter) is None:
                self._undo.append(watch_gradient(parameter, self))
            self.order.watch(parameter)

    def leave(self) -> None:
        try:
            self.settle()
        finally:
            undos, self._undo = self._undo, []
            for undo in undos:
                undo()

    # A step.

    def choose(self) -> dict[int, torch.Tensor]:
        """The parameters whose step can be deferred, by id."""
        optimizer, chosen = self._optimizer, dict[int, torch.Tensor]()
        self._counts.undeferred_reasons.clear()
        reason = _reason_of(optimizer)
        if reason is None and states_are_held(optimizer):
            reason = "the program holds optimizer.state"
        states = vars(optimizer)["state"]
        self._states_before = len(states)
        self._numbers = {id(one): number for number, one in enumerate(parameters_of(optimizer))}
        for group in optimizer.param_groups:
            parameters: list[torch.Tensor] = group["params"]
            is_mixed = is_one_decision(parameters)
            for parameter in parameters:
                if gradient_anywhere(parameter) is None:
                    continue
                why = reason or ("its group mixes kinds of parameters or gradients" if is_mixed else None)
                why = why or self._reason_for(states, parameter)
                if why is None:
                    chosen[id(parameter)] = parameter
                else:
                    self._counts.undeferred_reasons[why] += 1
        return chosen

    def _reason_for(self, states: Any, parameter: torch.Tensor) -> str | None:
        """Why the step of `parameter` cannot wait; None if it can."""
        if type(parameter) is FakeTensor:
            return None  # nobody can read values of it
        if type(parameter) is not torch.nn.Parameter or not parameter.is_leaf or parameter.layout is not torch.strided:
            return "it is not a plain torch.nn.Parameter"
        if getattr(gradient_anywhere(parameter), "layout", torch.strided) is not torch.strided:  # a name would hold it
            return "its gradient is sparse, which many optimizers refuse"
        if is_managed(parameter):
            return "its values are on the host"
        if holder_of(parameter) not in (None, self, self._copies.gradients):
            return "another session has its gradient"
        if gradient_is_held(parameter):
            return "the program holds its gradient"
        if memory_is_held(parameter):
            return "another tensor has its memory"
        return "the program holds its state" if state_is_held(states, parameter, self._hosts) else None

    def defer(self, sliced: SlicedStep, chosen: dict[int, torch.Tensor], stepped_before: int) -> None:
        """From now on `chosen` wait to be stepped. Their versions are as after the step, so that a graph from before it
        raises as in plain PyTorch."""
        if not chosen:
            return
        self._watch(chosen.values())
        pairs = [
            (index, one)
            for index, group in enumerate(self._optimizer.param_groups)
            for one in group["params"]
            if id(one) in chosen
        ]
        pairs.sort(key=lambda pair: self.order.position(pair[1]))
        slices = slices_in_order(pairs, self._copies.bytes_moving, self._copies.slice_bytes())
        gradients = TakenGradients(self._copies.gradients, [one for _, one in pairs])
        steps = self._copies.device_steps(gradients)
        pending = DeferredStep(self._optimizer, sliced, slices, gradients, steps, stepped_before)
        self._pending, self._is_unsettled = pending, True
        torch.autograd.graph.increment_version(list(chosen.values()))
        for parameter in chosen.values():
            if type(parameter) is torch.nn.Parameter:
                guard(parameter, self)
            else:  # a fake tensor: its gradient is seen where it was
                set_native_gradient(parameter, gradients.peek(parameter))
                gradients.drop(parameter)
        self._counts.deferred += len(chosen)
        self.order.begin()

    def settle(self) -> None:
        """Steps what waits, and waits until the state is on the host."""
        with self._lock:
            if self._is_busy or self._forks != forks.count:
                return
            while self._pending is not None:
                self._step(next(self._pending.parameters()))
            if self._is_unsettled:
                self._is_unsettled = False
                self._copies.finish_copies()
                self._put_in_order()

    def _put_in_order(self) -> None:
        """States that the step has made were made in the order of use. A state_dict has them in that of the groups."""
        states = vars(self._optimizer)["state"]
        made = list(states)[self._states_before :]
        if len(made) > 1:
            numbers = self._numbers
            for one in sorted(made, key=lambda one: numbers.get(id(one), len(numbers))):
                states[one] = states.pop(one)

    # Uses of parameters and gradients.

    def before_use(self, parameter: torch.Tensor) -> None:
        """A function gets `parameter`, outside of its module's call."""
        if self._forks != forks.count:
            raise VdnnError(
                "a parameter whose step is deferred is used in a child process, where the device cannot be used. Call "
                "optimizer.state_dict() before the fork."
            )
        self._step_with(parameter)

    def before_read(self, parameter: torch.Tensor) -> None:
        """`parameter.grad` is read."""
        if self._forks != forks.count:
            return
        with self._lock:
            pending = self._pending
            if pending is not None and not pending.gradients.is_dropped(parameter):
                self._step_with(parameter)

    def before_write(self, parameter: torch.Tensor) -> None:
        """`parameter.grad` is written."""
        with self._lock:
            if self._pending is not None:
                self._pending.gradients.drop(parameter)

    def write(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        with self._lock:
            with torch._C.DisableTorchFunctionSubclass():
                set_native_gradient(parameter, gradient)  # raises as torch does, and then nothing has changed
            self.before_write(parameter)

    def peek(self, parameter: torch.Tensor) -> torch.Tensor | None:
        pending = self._pending
        if pending is not None and pending.has(parameter):
            return pending.gradients.peek(parameter)
        return native_gradient(parameter)

    def _drop(self, parameters: Iterable[torch.Tensor]) -> None:
        """The program drops the gradients of `parameters`, and does not read them."""
        with self._lock:
            pending = self._pending
            if pending is None:
                return
            for parameter in parameters:
                if pending.has(parameter):
                    pending.gradients.drop(parameter)

    def _before_module(self, parameters: list[torch.Tensor]) -> None:
        """A module that has `parameters` is about to run; none: a part of it that no hook sees may have any."""
        if not self._is_unsettled:
            return
        with self._lock:
            for parameter in parameters:
                self._counts.overlapped_updates += self._step_with(parameter)
            pending = self._pending
            if self._is_busy:
                return
            if pending is None:
                self._copies.release_what_left(only_if_over=True)
                return
            with self._at_work():
                pending.fetch_ahead()

    def _behind_model(self) -> None:
        """Called after the outermost module. Releases tensors that were fetched for other modules."""
        with self._lock:
            if self._is_busy or not self._is_unsettled:
                return
            if self._pending is not None:
                with self._at_work():
                    self._pending.give_up_ahead()
            self._copies.release_what_left(only_if_over=False)

    def _step_with(self, parameter: torch.Tensor) -> int:
        """Steps the slice that has `parameter`, if it waits. Returns the number of its parameters."""
        with self._lock:
            pending = self._pending
            is_waiting = pending is not None and not self._is_busy and pending.has(parameter)
            return self._step(parameter) if is_waiting else 0

    def _step(self, parameter: torch.Tensor) -> int:
        pending = self._pending
        if pending is None:
            return 0
        part = pending.part_with(parameter).all_parameters()
        with interrupts_wait():
            try:
                with self._at_work():
                    for one in part:
                        guard_no_longer(one)
                    pending.step(parameter)
            except BaseException:
                self._failed(pending, part)
                raise
            if pending.is_over:
                self._pending = None
        return len(part)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Inside, this thread reads what waits."""
        self._is_busy = True
        try:
            with outside_of_transforms():
                yield
        finally:
            self._is_busy = False

    def _failed(self, pending: DeferredStep, part: list[torch.Tensor]) -> None:
        """Copies of `part` cannot come, which may be better later; or its step failed, and nothing can be mended."""
        if pending.has(part[0]):
            for one in part:
                if type(one) is torch.nn.Parameter:
                    guard(one, self)
            return
        self._pending = None
        for one in pending.parameters():
            guard_no_longer(one)
        pending.give_up_ahead()
        pending.give_back()


def _reason_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Why no step of `optimizer` can wait; None if it can."""
    module = type(optimizer).__module__
    if module != "torch.optim" and not module.startswith("torch.optim."):
        return f"{type(optimizer).__name__} is not of torch.optim, and its step may draw random numbers"
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and dynamo.counters["frames"]["total"]:
        return "torch.compile has compiled code, which reads parameters where no hook is"
    return None


def _refuse_several_ranks() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise VdnnError(
            "optimizer_step='deferred': torch.distributed is initialized, and DDP and FSDP read parameters where no "
            "hook can step them first. Leave out optimizer_step=."
        )


# Follows the calls of modules, to know which parameter each is about to use, and in which order they are used.

_HOOKS = torch.nn.modules.module
# In evaluation they give the parameters of their parts to one kernel, unless one of these has a class of its own.
_FUSED_IN_EVALUATION = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder, torch.nn.MultiheadAttention)


class _Outermost(threading.local):
    module: torch.nn.Module | None = None


class ModuleCallOrder:
    """Calls `before(parameters)` ahead of every call of a module, and `behind()` after the outermost one."""

    def __init__(self, before: Callable[[list[torch.Tensor]], None], behind: Callable[[], None]) -> None:
        self._before = before
        self._behind = behind
        self._watched: dict[int, torch.Tensor] = {}  # by id
        self._positions: dict[int, int] = {}  # by id, of the last round
        self._now: dict[int, int] = {}
        self._outermost = _Outermost()
        self._handles: list[Any] = []
        self._forks = forks.count

    def watch(self, parameter: torch.Tensor) -> None:
        self._watched[id(parameter)] = parameter

    def enter(self) -> None:
        handle = _HOOKS.register_module_forward_pre_hook(self._enter_module)
        # Ahead of the hooks that look at the memory of parameters.
        hooks: Any = _HOOKS._global_forward_pre_hooks
        hooks.move_to_end(handle.id, last=False)
        self._handles = [handle, _HOOKS.register_module_forward_hook(self._leave_module, always_call=True)]

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        del self._before, self._behind  # whoever is called holds this

    def begin(self) -> None:
        """A round begins: the order of uses from now on is the next one's guess."""
        if self._now:
            self._positions, self._now = self._now, {}

    def position(self, parameter: torch.Tensor) -> int:
        """The position of `parameter` in the order of first uses. Unused parameters come last."""
        return (self._now or self._positions).get(id(parameter), len(self._watched))

    def _enter_module(self, module: torch.nn.Module, args: object) -> None:
        if torch.compiler.is_compiling() or self._forks != forks.count:
            return
        if not in_backward() and self._outermost.module in (None, module):  # the same: Ctrl-C calls no hooks
            self._outermost.module = module
        own = _own_and_hidden(module)
        parameters = [one for one in own if id(one) in self._watched]
        if len(self._now) < len(self._watched):
            for one in parameters:
                self._now.setdefault(id(one), len(self._now))
        if transform_level() is not None or is_jit_traced():
            parameters = list(self._watched.values())
        self._before(parameters)

    def _leave_module(self, module: torch.nn.Module, args: object, output: object) -> None:
        if self._outermost.module is module and not torch.compiler.is_compiling():
            self._outermost.module = None
            self._behind()


def _own_and_hidden(module: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters of `module`, and those of its parts if they run where no hook is."""
    is_whole = isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None
    is_whole = is_whole or type(module).__name__ == "OptimizedModule"
    is_whole = is_whole or (isinstance(module, _FUSED_IN_EVALUATION) and not module.training)
    parts = itertools.chain.from_iterable(part._parameters.values() for part in (module.modules() if is_whole else ()))
    own = parts if is_whole else iter(module._parameters.values())
    return [one for one in own if one is not None]
