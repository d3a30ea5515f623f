"""Follows the calls of modules: brings their parameters before a call, and drops them after it."""

from __future__ import annotations

import dis
import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from vdnn.errors import VdnnError
from vdnn.runtime.torch_internals import forks, parameter_access
from vdnn.runtime.torch_internals.backward_ends import graph_task, in_backward
from vdnn.runtime.torch_internals.backward_inputs import find_inputs
from vdnn.runtime.torch_internals.data_reads import native_data, watch_data, watch_data_no_longer
from vdnn.runtime.torch_internals.hooks_of_others import give_hooks_memory
from vdnn.runtime.torch_internals.parameter_access import watch_parameters_of
from vdnn.runtime.torch_internals.parameter_guard import guard, guard_no_longer, is_guarded, is_in_place
from vdnn.runtime.torch_internals.saved_modes import fewer_modes
from vdnn.runtime.torch_internals.tensor_kinds import is_jit_traced, num_dispatch_modes, outside_of_transforms
from vdnn.runtime.torch_internals.tensor_swaps import watch_swaps
from vdnn.runtime.training_state.parameters.away_parameter import AwayParameter, is_held
from vdnn.runtime.training_state.parameters.streaming import Streaming
from vdnn.runtime.training_state.parameters.writes import UnsafeWrite, Use, Writes
from vdnn.user_warnings import line_of_user

_BACKWARD, _BETWEEN = "backward", "between calls"
_LOOKED_AT = 2  # calls of one model behind which reads with a gradient are looked for
_DEPTH = 3  # of lists and dicts in which a module may keep parameters of others
_SHOWN = 3  # parameters of which the report says the same


@dataclass(slots=True)
class _Call:
    """One call of a module that runs, and the parameters that it brought."""

    module: torch.nn.Module
    used: list[AwayParameter] = field(default_factory=list)
    nodes: list[object] = field(default_factory=list)  # where gradients of these arrive, until the graph holds them
    began_at: int = 0  # the sequence number of autograd's next node, before the first use


class _CallStacks(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Call] = []


class ModuleCalls:
    """While entered, follows the calls of all modules. `away` are the managed parameters, by id.

    `let_stay(parameter, reason)` ends the management of one.
    """

    def __init__(
        self,
        away: dict[int, AwayParameter],
        model: torch.nn.Module,
        streaming: Streaming,
        writes: Writes,
        let_stay: Callable[[AwayParameter, str], None],
    ) -> None:
        self._away = away
        self._model = model
        self._streaming = streaming
        self._writes = writes
        self._let_stay = let_stay
        self.uses = GraphUses(self._let_go)
        streaming.let_go, streaming.adopt = self._let_go, self._adopt
        streaming.before_use_in_place = self._before_use_in_place
        streaming.before_backward = self._refuse_late_writes
        self._calls = _CallStacks()
        self._running = 0  # outermost calls, on all threads
        # Those that a module is known to read without taking them from the module that has them.
        self._read_in: weakref.WeakKeyDictionary[torch.nn.Module, list[AwayParameter]] = weakref.WeakKeyDictionary()
        self._called: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._read_outside: set[str] = set()  # names
        self._held: set[str] = set()  # names of those whose memory on the device the program held
        self._between = UsesBetweenCalls(
            self._read_in_graph,
            self._is_held_on_host,
            self._bring_between_calls,
            self._use_on_host,
            self._return_written,
            self._device_between_calls,
            self._becomes_another,
        )
        self._are_apart = any(_is_apart(one) for one in away.values())
        self._too_late: list[Use] = []  # written to on the host while they ran on the device
        self._undo: list[Callable[[], object]] = []
        self._forks = forks.count
        self._modes = 0  # of dispatch, as the session was entered

    def __enter__(self) -> ModuleCalls:
        self._modes = num_dispatch_modes()
        hooks = torch.nn.modules.module
        for handle in (
            hooks.register_module_forward_pre_hook(self._before),
            hooks.register_module_forward_hook(self._after, always_call=True),
            register_optimizer_step_pre_hook(self._refuse_late_writes),
            register_optimizer_step_post_hook(self._stepped),
        ):
            self._undo.append(handle.remove)
        for module in self._model.modules():
            if any(id(one) in self._away for one in module._parameters.values()):
                self._undo.append(watch_parameters_of(module, self._taken))
        for away in self._away.values():
            watch_data(away.parameter, self)
            self._undo.append(functools.partial(watch_data_no_longer, away.parameter))
        self._watch_between_calls(is_new=True)
        self._undo.append(self._between.end)
        managed = frozenset(self._away)  # those that stay on the device from some time on have moved before
        self._undo.append(find_inputs(lambda one: id(one) in managed, self._before_graph_of_gradients))
        self._undo.append(watch_swaps())
        self._undo.append(give_hooks_memory(lambda one: id(one) in self._away))
        return self

    def __exit__(self, *exception: object) -> None:
        while self._undo:
            self._undo.pop()()

    def forget(self, away: AwayParameter) -> None:
        """The session no longer manages `away`."""
        self.uses.forget(away)
        self._between.forget(away.parameter)

    def lines(self) -> list[str]:
        kept = {name: f"{times} times" for name, times in self._writes.kept.items()}
        return [
            *_some(sorted(self._read_outside), "is read outside of its module, and stays while its reader runs"),
            *_some(self.uses.found, "is used again, and stays until its gradient is there"),
            *_some(kept, lambda name: f"is written to while a module runs, {kept[name]}, and copied out"),
            *_some(sorted(self._held), "stays on the device while the program holds its memory"),
        ]

    # Hooks.

    def _before(self, module: torch.nn.Module, args: object) -> None:
        if torch.compiler.is_compiling() or forks.count != self._forks or not self._away:
            return
        if num_dispatch_modes() > self._modes:  # a selective checkpoint's counts operations, and would count ours
            with fewer_modes(self._modes):
                self._before(module, args)
            return
        stack = self._calls.stack
        if stack and stack[0].module is module and not in_backward():
            stack.clear()  # Ctrl-C: torch calls no hooks behind it
            self._running = 0
        if not stack:
            self._begin(module)
        call = _Call(module)
        stack.append(call)
        wanted = [self._away[id(one)] for one in module._parameters.values() if id(one) in self._away]
        wanted += self._read_in.get(module, ())
        if wanted:
            self._bring(wanted, call)

    def _begin(self, module: torch.nn.Module) -> None:
        if not self._running and not in_backward():
            self._refuse_late_writes()
            self.uses.release_dead()
            self._streaming.begin()
            self._writes.call_begins()
        if is_jit_traced():
            self.give_all_back("torch.jit.trace ran inside the session: what it makes holds parameters itself")
        self._between.end()  # also in a backward, for the modules of a checkpoint
        self._running += 1
        called = self._called.get(module, 0)
        if not called:
            for part in module.modules():
                self._look_into(part)
        self._called[module] = called + 1

    def _look_into(self, module: torch.nn.Module) -> None:
        """Finds parameters of other modules that `module` keeps in a list or dict of its own. No hook is called when
        they are used."""
        own = {id(one) for one in module._parameters.values()}
        found = [self._away.get(id(one)) for one in _parameters_in(vars(module)) if id(one) not in own]
        if read := [one for one in found if one is not None]:
            self._read_in[module] = read
            self._read_outside |= {one.name for one in read}

    def _after(self, module: torch.nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling() or forks.count != self._forks:
            return
        if num_dispatch_modes() > self._modes:
            with fewer_modes(self._modes):
                self._after(module, args, output)
            return
        stack = self._calls.stack
        if all(call.module is not module for call in stack):
            return
        while True:  # an exception may have skipped the exits of inner modules
            call = stack.pop()
            if stack and call.module is module:
                self._returned(output, stack[-1])
            self._leave(call, output if call.module is module else None)
            if call.module is module:
                break
        if not stack:
            self._running = max(0, self._running - 1)
            if not self._running and not in_backward():
                self._end(module)
        if self._too_late:
            use = self._too_late[0]
            self._too_late.clear()
            raise VdnnError(
                f"parameter {use.away.name} was written to on the host while {use.module} ran with its copy on the "
                f"device, in the call at {line_of_user()}. The program took that memory between calls of modules, such "
                "as by state_dict() or detach(). Write to it between calls, or to the parameter itself."
            )

    def _end(self, module: torch.nn.Module) -> None:
        self._streaming.drop_unused()
        self._watch_between_calls(is_new=self._called.get(module, 0) < _LOOKED_AT)
        lost = self._writes.call_ends()
        for use in lost:
            if id(use.away.parameter) in self._away:
                self._give_back(use.away, UnsafeWrite.UNSEEN.value, is_held_on_host=False)  # refused in any case
        if lost:
            raise VdnnError(
                f"parameter {lost[0].away.name} was written to while {lost[0].module} ran, in the call at "
                f"{line_of_user()}, in a way that torch does not count: by DLPack, an address, or a kernel. This write "
                "is lost, and those of earlier calls may be. Write with operations of torch, or leave out parameters=, "
                "and load the last checkpoint before you go on."
            )

    # Parameters.

    def _taken(self, parameter: torch.nn.Parameter) -> None:
        """The program takes this parameter from a module."""
        away = self._away.get(id(parameter))
        if away is not None and not away.users and self._calls.stack and reads_values(2):
            self._read(away)

    def _read(self, away: AwayParameter) -> None:
        """The module that runs reads a parameter of another one."""
        if torch.compiler.is_compiling() or forks.count != self._forks:
            return
        self._read_outside.add(away.name)
        with fewer_modes(self._modes):
            self._bring([away], self._calls.stack[-1])

    def _returned(self, output: object, caller: _Call) -> None:
        """A module returns parameters to the one that called it, which reads them from now on."""
        if type(output) is torch.Tensor:  # no parameter, as most outputs
            return
        found = [self._away.get(id(one)) for one in _parameters_in(output)]
        if returned := [one for one in found if one is not None]:
            self._read_outside |= {one.name for one in returned}
            self._bring(returned, caller)

    def before_data_are_taken(self, parameter: torch.Tensor) -> None:
        """The program reads `parameter.data`, and may write there."""
        away = self._away.get(id(parameter))
        if away is None or away.is_stepped:
            return
        if not away.users and self._calls.stack:
            self._read(away)
        elif not self._calls.stack:
            self._bring_between_calls([parameter], writes=False)
        if away.is_in_place:
            away.is_exposed = True
        elif away.on_device is not None:
            self._streaming.drop(away)

    def _stepped(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Called after the step of an optimizer, which has written to parameters in place, or to their host memory if
        no session manages the optimizer. torch's fused steps write without a new version."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                away = self._away.get(id(parameter))
                if away is None or away.on_device is None:
                    continue
                with torch._C.DisableTorchFunction():
                    if away.is_in_place:
                        away.is_exposed = True
                        self._write_through(away, None)
                    else:
                        self._streaming.drop(away)
        self._between.step_ended()

    def is_read_between_calls(self, away: AwayParameter) -> bool:
        """True if the program was seen to read it where no module runs: there it finds it on the host. An average of
        weights that it makes there is on the host as well."""
        return id(away.parameter) in self._between.read

    def _is_held_on_host(self, parameter: torch.Tensor) -> bool:
        away = self._away.get(id(parameter))
        return away is not None and away.is_held_on_host()

    def _read_in_graph(self, tensors: list[torch.Tensor], held: set[int]) -> None:
        """Between calls, a graph is made of these parameters. `held`: the ids of those whose memory of the host the
        program held before."""
        with torch._C.DisableTorchFunction():
            for away in [self._away[id(one)] for one in tensors if id(one) in self._away]:
                reason = "it is read between calls of modules, with its gradient"
                self._give_back(away, reason, is_held_on_host=id(away.parameter) in held)

    def _before_graph_of_gradients(self) -> None:
        """Called before `backward(create_graph=True)`. Trained parameters stay on their device from now on, so that the
        graph of their gradients is there, except those whose memory of the host the program holds."""
        with self._streaming.lock, torch._C.DisableTorchFunction():
            for away in [one for one in self._away.values() if one.is_trained and one.parameter.requires_grad]:
                if away.is_there() and not away.is_held_on_host():
                    self._give_back(away, "its gradient has a graph, by backward(create_graph=True)")

    # Between calls, see [Note: Between calls].

    def _watch_between_calls(self, *, is_new: bool) -> None:
        """`is_new`: the model was not called before, or once."""
        if is_new or self._are_apart:
            away = self._away.values()
            self._between.begin(one.parameter for one in away if one.parameter.requires_grad or _is_apart(one))

    def _device_between_calls(self, parameter: torch.Tensor) -> torch.device | None:
        away = self._away.get(id(parameter))
        return None if away is None or away.is_stepped or not _is_apart(away) else away.home

    def _bring_between_calls(self, tensors: list[torch.Tensor], *, writes: bool) -> bool:
        """The program is about to use parameters while no module runs, perhaps in a hook on a gradient. False if they
        are used on the host."""
        if self._calls.stack or forks.count != self._forks:
            return False
        with self._streaming.lock, torch._C.DisableTorchFunction():
            known = [self._away.get(id(one)) for one in tensors]
            found = [one for one in known if one is not None and _is_apart(one)]
            if any(one.is_stepped or not one.is_there() for one in found):
                return False
            missing = [one for one in found if not one.is_in_place]
            if not missing:
                return False
            # What the program holds on the host would not see a write to the copy on the device.
            is_on_host = not writes and any(one.is_held_on_host() for one in missing)
            try:
                if not is_on_host:
                    self._streaming.use(found, _BACKWARD if in_backward() else _BETWEEN)
            except (torch.OutOfMemoryError, MemoryError):
                is_on_host = True
            if is_on_host:
                for one in found:  # all of them are used there
                    if not one.users:
                        self._let_go(one)
                self._settle_on_host(found)
                return False
            for one in missing:
                if one.on_device is not None and not one.is_in_place:
                    one.put_in_place(one.on_device)
                    self._writes.use_begins(one)
        return True

    def _use_on_host(self, tensors: list[torch.Tensor]) -> None:
        """The program is about to use parameters where they are, between calls: those that are away on the host."""
        if not self._calls.stack and forks.count == self._forks:
            with self._streaming.lock, torch._C.DisableTorchFunction():
                self._settle_on_host([self._away[id(one)] for one in tensors if id(one) in self._away])

    @staticmethod
    def _settle_on_host(used: list[AwayParameter]) -> None:
        """Blocks until copies of their memory of the host are over, because the program may write to it from now on: a
        function that it called before may read the copy later."""
        for away in used:
            if _is_apart(away) and not away.is_in_place:
                away.copies.settle_uses(away.host)

    def _becomes_another(self, parameter: torch.Tensor) -> None:
        """The program makes another parameter of its memory, as a parametrization does: both stay on the device."""
        away = self._away.get(id(parameter))
        if away is not None:
            with self._streaming.lock, torch._C.DisableTorchFunction():
                self._give_back(away, "the program made another parameter of its memory")

    def _return_written(self, tensors: list[torch.Tensor]) -> None:
        """The program has written to parameters that were brought between calls: the host has the new values at once,
        for whoever holds them there."""
        for one in [self._away[id(tensor)] for tensor in tensors if id(tensor) in self._away]:
            if not one.users:
                self._let_go(one)

    def _bring(self, wanted: list[AwayParameter], call: _Call) -> None:
        with torch._C.DisableTorchFunction():
            for one in list(wanted):
                if one.parameter.requires_grad and not one.is_trained:
                    self._give_back(one, "it was frozen as the session began, and is trained now")
                    wanted.remove(one)
                elif not one.is_there() and not self._adopt(one):
                    wanted.remove(one)
            if not wanted:
                return
            if not call.used:
                call.began_at = _next_sequence_number()
            with self._streaming.lock:
                if not all(one.stays for one in wanted):
                    self._streaming.use(wanted, self._phase())
                for one in wanted:
                    self._before_use_in_place(one)
                    one.users += 1
                    call.used.append(one)
                    if one.on_device is not None and not one.is_in_place:
                        one.put_in_place(one.on_device)
                        self._writes.use_begins(one)
                    call.nodes.append(self.uses.used(one))

    def _leave(self, call: _Call, output: object) -> None:
        """`output`: what the module returned, or None."""
        with self._streaming.lock, torch._C.DisableTorchFunction():
            self.uses.call_ends(call.used, call.nodes, call.began_at, output)
            for one in call.used:
                one.users = max(0, one.users - 1)
                if not one.users:
                    self._let_go(one, call.module)
                elif one.users == one.is_held:
                    self._write_through(one, call.module)
            call.nodes.clear()

    def _let_go(self, away: AwayParameter, module: torch.nn.Module | None = None) -> bool:
        """Neither a module nor a graph holds the parameter on the device. Returns True if its data are on the host
        then, see [Note: One memory]."""
        if id(away.parameter) not in self._away or not away.is_in_place:
            return not away.is_in_place
        with self._streaming.lock, outside_of_transforms(), torch._C.DisableTorchFunction():
            if not away.is_there():
                return self._can_adopt(away) and self._adopt(away)
            is_held = not away.stays and away.is_held_on_device()
            if is_held or away.stays:
                if is_held:
                    self._held.add(away.name)
                self._write_through(away, module)
                return False
            found = self._writes.use_ends(away, lambda: self._name_of(module))
            if found is UnsafeWrite.UNSEEN and not self._is_copied_out(away):
                self._give_back(away, found.value)
                return False
            away.put_host_in_place()
            if found is UnsafeWrite.BOTH or (found is UnsafeWrite.ON_HOST and module is not None):
                self._too_late.append(Use(away, self._name_of(module)))
            if found in (UnsafeWrite.ON_HOST, UnsafeWrite.BOTH) or away.is_held_on_host():
                self._streaming.drop(away)  # the program may write to what it holds
            return True

    def _before_use_in_place(self, away: AwayParameter) -> None:
        """A module or a backward is about to use `away`. If its copy on the device is in place, but no module runs with
        it, the program may have written to the memory of the host that it holds: such a write comes first."""
        if away.is_in_place and away.users == away.is_held:
            self._write_through(away, None)

    def _refuse_late_writes(self, *_: object) -> None:
        """A call, a backward or a step begins: all writes until now were the program's."""
        if (self._held or self.uses.holds_some) and not self._running:
            with self._streaming.lock, torch._C.DisableTorchFunction():
                for away in list(self._away.values()):
                    if away.is_in_place and away.users == away.is_held:
                        self._write_through(away, None, is_behind_writes=True)

    def _write_through(
        self, away: AwayParameter, module: torch.nn.Module | None, *, is_behind_writes: bool = False
    ) -> None:
        """Writes changes through, while the copy on the device stays in place. If the program also holds the host
        memory, changes on the device are copied there, and its own changes between calls are copied to the device.
        `is_behind_writes`: what changed on the device was written between calls, which the host memory did not see."""
        if not away.is_in_place or not away.is_there() or not away.is_held_on_host():
            return
        is_late = is_behind_writes and self._writes.is_written_to(away)
        found = self._writes.use_ends(away, lambda: self._name_of(module))
        if found is UnsafeWrite.UNSEEN:
            self._is_copied_out(away)
        if found is UnsafeWrite.ON_HOST and module is None:
            self._writes.renew(away)
        elif found in (UnsafeWrite.ON_HOST, UnsafeWrite.BOTH):
            self._too_late.append(Use(away, self._name_of(module)))
        self._writes.use_begins(away)
        if is_behind_writes and (found is UnsafeWrite.UNSEEN or (is_late and found is None)):
            raise VdnnError(
                f"parameter {away.name} was written to between calls of modules, while a graph or the program holds "
                "its copy on the device. Its memory on the host, which the program holds as by state_dict() or "
                "detach(), saw that write no earlier than now. Let that go ahead of such a write."
            )

    def _is_copied_out(self, away: AwayParameter) -> bool:
        """Notes a write to the copy on the device that torch did not count. If the program holds memory of the host, it
        has to see that: from now on the copy is written there behind each use."""
        if not away.is_held_on_host():
            return False
        away.is_copied_out = True
        self._writes.use_ends(away, lambda: "")
        return True

    def _name_of(self, module: torch.nn.Module | None) -> str:
        if module is None:
            return "a graph"
        names = (name for name, one in self._model.named_modules() if one is module)
        return f"{next(names, '') or 'the model'} ({type(module).__name__})"

    def _give_back(self, away: AwayParameter, reason: str, *, is_held_on_host: bool | None = None) -> None:
        """`away` stays on the device from now on. Refused where the program holds its memory of the host, unless that
        is no longer the parameter's."""
        if is_held_on_host is None:
            is_held_on_host = away.is_there() and away.is_held_on_host()
        if is_held_on_host:
            raise VdnnError(
                f"parameter {away.name} has to be on the device from now on, because {reason}. But the program holds "
                "its memory on the host, as by state_dict(), detach() or numpy, which would see no later step. Let "
                "that go before, or take it ahead of the session."
            )
        for read in self._read_in.values():
            if away in read:
                read.remove(away)
        self._let_stay(away, reason)

    def give_all_back(self, reason: str) -> None:
        """All parameters return to the device, and nothing is fetched any longer. If one is refused, none returns."""
        no_function_modes = torch._C.DisableTorchFunction()
        with fewer_modes(self._modes), outside_of_transforms(), self._streaming.lock, no_function_modes:
            held = [one for one in self._away.values() if one.is_there() and one.is_held_on_host()]
            for away in held or list(self._away.values()):
                self._give_back(away, reason)

    def in_step(self, away: AwayParameter) -> bool:
        """An optimizer is about to step `away`. True: the host copy is the parameter's data, to be stepped on a copy.
        False: they are on the device, in use, and are stepped there."""
        if not away.is_in_place:
            return True
        with self._streaming.lock:
            if away.users > away.is_held:
                return False
            self.uses.forget(away)
            away.users = 0
            return self._let_go(away)

    # Data that the program replaced.

    @staticmethod
    def _can_adopt(away: AwayParameter) -> bool:
        data, host = native_data(away.parameter), away.host.tensor
        is_alike = data.dtype == host.dtype and data.size() == host.size() and data.layout == host.layout
        if not is_alike or data.device not in (host.device, away.device):
            return False
        return data.device == away.device or not (is_held(data, tensors=2) or away.is_held_on_host())

    def _adopt(self, away: AwayParameter) -> bool:
        """The program put other data in the place of the parameter's. Their values are those of the host copy from now
        on, or the parameter stays on the device if the program holds their memory. True: it is still managed."""
        if not self._can_adopt(away):
            raise VdnnError(
                f"parameter {away.name} was moved or replaced by .data, .to() or another conversion while a session "
                "with parameters= manages it. Convert the model before the session, or after it."
            )
        data, host, moving = native_data(away.parameter), away.host, away.on_device
        away.replaced += 1
        # Nor is memory of the host that the program holds that of the parameter any longer.
        if is_held(data, tensors=2) or away.is_held_on_host() or data.stride() != host.tensor.stride():
            self._give_back(away, "the program put another tensor in its place, and holds one of the two")
            return False
        away.copies.settle_uses(host)
        with torch.no_grad():
            host.tensor.copy_(data)
        away.put_host_in_place()
        if moving is not None:
            away.copy_version = moving.tensors[0]._version
            self._streaming.drop(away)
        return True

    def _phase(self) -> Hashable:
        if in_backward():
            return _BACKWARD
        root = self._calls.stack[0].module
        return id(root), root.training


def _parameters_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.nn.Parameter):
        yield value
    elif depth and isinstance(value, dict):
        for one in value.values():
            yield from _parameters_in(one, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for one in value:
            yield from _parameters_in(one, depth - 1)


def _is_apart(away: AwayParameter) -> bool:
    """True if tensors of its device and of the host do not mix in an operation."""
    return away.home is not None and away.home.type != "cpu"


# Notices what the program does with parameters between calls of modules.
#
# [Note: Between calls] Parameters that are away are on the host between calls, where operations cannot mix them with
# tensors of their device: averages of weights that are on the device, perturbations, distances to earlier weights. So
# a parameter is guarded there (parameter_guard), and comes to the device for each function that gets it, and for a read
# of `.data`. It leaves with the next use of another one, or at once if it was written to, unless the program holds what
# it got. state_dict(), copies and pickles are made of the host's. Where the program holds memory of the host, or the
# device has no room, parameters are used on the host. No function mode is active, and none is guarded while a module
# runs.
#
# Where the device is the CPU itself, nothing has to move, and trained parameters are guarded only in the first calls of
# a model, for reads with a gradient, such as a penalty on a norm. They make a graph of the host copy, whose gradient
# would be the CPU's, so the parameter stays on the device from then on.

_SAVING = torch.nn.Module._save_to_state_dict.__code__
_COPIES = frozenset(("copy_", "cpu", "numpy"))  # names of functions that copy between devices


class UsesBetweenCalls:
    """Calls `read(parameters, held)` for the parameters that a graph was made of, which moves them to the device for
    good. `held`: ids of parameters for which `is_held(parameter)` was true before. A graph may hold memory, too.
    `bring`, `use_on_host` and `written`: see [Note: Between calls]. `device_of(parameter)` is what a program sees as
    its device. `becomes_another(parameter)` moves a parameter to the device for good, where another one is made of its
    memory."""

    def __init__(
        self,
        read: Callable[[list[torch.Tensor], set[int]], None],
        is_held: Callable[[torch.Tensor], bool],
        bring: Callable[..., bool],
        use_on_host: Callable[[list[torch.Tensor]], None],
        written: Callable[[list[torch.Tensor]], None],
        device_of: Callable[[torch.Tensor], torch.device | None],
        becomes_another: Callable[[torch.Tensor], None],
    ) -> None:
        self._read, self._is_held, self._bring, self._written = read, is_held, bring, written
        self._use_on_host = use_on_host
        self.device_of, self.becomes_another = device_of, becomes_another
        self._held: set[int] = set()
        self.read: set[int] = set()  # ids of parameters that any function has read on the host, or written to
        self._watched: dict[int, torch.nn.Parameter] = {}

    def begin(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """No module runs from now on."""
        for one in parameters:
            if type(one) is torch.nn.Parameter:
                self._watched[id(one)] = one
                guard(one, self)

    def step_ended(self) -> None:
        """An optimizer has stepped, which no longer reads parameters."""
        for one in self._watched.values():
            if type(one) is torch.nn.Parameter:
                guard(one, self)

    def end(self) -> None:
        """A module runs from now on."""
        watched, self._watched = self._watched, {}
        for one in watched.values():
            guard_no_longer(one)

    def forget(self, parameter: torch.Tensor) -> None:
        """The session no longer manages this one. If it stayed guarded, the next function that reads it would find that
        it has to move, and would be called twice."""
        self._watched.pop(id(parameter), None)
        guard_no_longer(parameter)

    def before_use(self, parameter: torch.Tensor) -> None:
        guard_no_longer(parameter)
        with torch._C.DisableTorchFunction():
            self._held.discard(id(parameter))
            if torch.is_grad_enabled() and self._is_held(parameter):
                self._held.add(id(parameter))

    def before_call(self, func: Callable[..., Any], parameters: list[torch.Tensor], caller: CodeType) -> bool:
        is_of_host = getattr(func, "__name__", "") in _COPIES or caller is _SAVING
        if not is_of_host and self._bring(parameters, writes=is_in_place(func)):
            return True
        if is_of_host:
            self._use_on_host(parameters)
        if not in_backward():  # recomputes read there
            self.read.update(map(id, parameters))
        return False

    def after_use(
        self, parameters: list[torch.Tensor], outcome: Any, error: Exception | None, *, writes: bool, brought: bool
    ) -> bool:
        """A function was called with `parameters`. True: it has to be called again, now that they are on the device."""
        known = [one for one in parameters if id(one) in self._watched]
        fails_on_host = error is not None and not brought
        if not writes and torch.is_grad_enabled() and (fails_on_host or _is_in_graph(outcome)):
            trained = [one for one in known if one.requires_grad]
            for one in trained:
                del self._watched[id(one)]
            self._read(trained, self._held)
            known = [one for one in known if id(one) in self._watched]
            again = bool(trained) and not brought
        else:
            again = False
        for one in known:
            if not is_guarded(one):
                guard(self._watched[id(one)], self)
        if writes and brought:
            self._written(known)
        return again


def _is_in_graph(outcome: object) -> bool:
    if isinstance(outcome, torch.Tensor):
        return outcome.grad_fn is not None
    return isinstance(outcome, (list, tuple)) and any(map(_is_in_graph, outcome))


# Keeps a parameter on the device from its first use to its gradient, if a graph uses it more than once.
#
# [Note: One accumulator] autograd sums the gradients of all uses of a parameter in one graph, and adds the sum to
# `parameter.grad`. torch starts a new sum when the data of a parameter are put on another device. Two sums that are
# added one after another round otherwise than one. So the data of a parameter that is used again stay on the device
# until its gradient is there. Tied parameters are known before; others when they are used again while a graph with them
# lives. By then the first use has a sum of its own. That changes no bit if autograd adds its gradient last. It does so
# unless it is a sum of several, or the graph has gradients of its own (`create_graph=True`), which autograd may run
# behind it. So until the first gradient of a parameter is there, its data stay behind a call of a module that used it
# more than once.

_MARK = "vdnn"
_LEAF = 2**64 - 1  # the sequence number of nodes at which gradients are accumulated
_next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class _Mark:
    """Lives as long as the node of a graph that has it."""

    __slots__ = ("__weakref__",)


class GraphUses:
    """`let_go(parameter)` is called when no graph holds it any longer."""

    def __init__(self, let_go: Callable[[AwayParameter], object]) -> None:
        self._let_go = let_go
        self._held: list[AwayParameter] = []
        self.found: set[str] = set()  # names of parameters that were used again

    def used(self, away: AwayParameter) -> object:
        """A module is about to use `away`, whose data are on the device. Returns an object to keep until the use."""
        parameter = away.parameter
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return None
        task = graph_task()
        if not away.is_shared and any(one == task and mark() is not None for one, mark in away.accumulators):
            away.is_shared = True
            self.found.add(away.name)
        if away.is_shared and not away.is_held:
            self._hold(away)
        with outside_of_transforms():  # inside of them, the parameter's view has no grad_fn
            node = torch.autograd.graph.get_gradient_edge(parameter).node
        known: dict[str, object] = node.metadata  # type: ignore[assignment]  # a property, which torch says is a method
        if _MARK not in known:
            mark = _Mark()
            known[_MARK] = mark
            away.accumulators = [pair for pair in away.accumulators if pair[1]() is not None]
            away.accumulators.append((task, weakref.ref(mark)))
        return node

    def call_ends(self, used: list[AwayParameter], nodes: list[object], began_at: int, output: object) -> None:
        """A call of a module that used these parameters ends. Their gradients arrive at `nodes`. Holds the parameters
        that it used more than once, unless it is known by now whether graphs use them again."""
        unknown = {
            node: away
            for away, node in zip(used, nodes, strict=True)
            if node is not None and not (away.is_shared or away.is_held or away.is_summed)
        }
        if not unknown or output is None:
            return
        for node, times in _edges_to(unknown.keys(), output, began_at).items():
            if times > 1:
                self._hold(unknown[node])

    def _hold(self, away: AwayParameter) -> None:
        away.is_held = True
        away.users += 1
        self._held.append(away)

    def accumulated(self, away: AwayParameter) -> None:
        """The gradient of `away` was accumulated, or a part of it if torch began another sum, because the second use
        was not known."""
        away.is_summed = True
        away.in_parts = sum(mark() is not None for _, mark in away.accumulators) > 1
        away.accumulators.clear()
        self._release(away)

    @property
    def holds_some(self) -> bool:
        return bool(self._held)

    def release_dead(self) -> None:
        """Releases what graphs held that no longer exist."""
        for away in list(self._held):
            if all(mark() is None for _, mark in away.accumulators):
                self._release(away)

    def forget(self, away: AwayParameter) -> bool:
        """No graph holds `away` any longer, whatever uses it. Returns True if one did."""
        was_held, away.is_held = away.is_held, False
        if was_held:
            away.users = max(0, away.users - 1)
            self._held.remove(away)
        return was_held

    def _release(self, away: AwayParameter) -> None:
        if self.forget(away) and not away.users:
            self._let_go(away)


def _edges_to(nodes: Collection[object], output: object, began_at: int) -> Counter[object]:
    """How many edges of the graph of `output` lead to each of the nodes. Looks only at nodes that were made since
    `began_at`."""
    found: Counter[object] = Counter()
    waiting = [one.grad_fn for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node in nodes:
                found[node] += 1
            elif node is not None and node not in seen and began_at <= node._sequence_nr() < _LEAF:
                seen.add(node)
                waiting.append(node)
    return found


# Tells whether a program that takes a parameter reads its values, from the instruction that follows.
#
# A parameter that is taken outside of its module comes to the device, for as long as the module that takes it runs.
# Many programs take one for its dtype or its shape alone (`x.to(self.head.weight.dtype)`); those need no copy. Bytecode
# that is not understood counts as a read.

# Attributes and methods that need no values, and are the same on every device.
_FACTS = frozenset(
    (
        *("shape", "dtype", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "_version", "itemsize"),
        *("is_quantized", "is_nested", "is_sparse", "_base", "nbytes", "size", "dim", "stride", "numel", "nelement"),
        *("element_size", "storage_offset", "is_contiguous", "is_floating_point", "is_complex", "requires_grad_"),
        *("ndimension", "_backward_hooks", "_post_accumulate_grad_hooks", "__class__"),
    )
)
_IN_BETWEEN_FILES = (parameter_access.__file__, torch.nn.modules.module.__file__)
_IN_BETWEEN = frozenset(("CACHE", "NOP", "EXTENDED_ARG"))


def reads_values(depth: int = 1) -> bool:
    """False if the program takes facts only. `depth`: the depth of the frame of the parameter dict's method that it
    called."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code.co_filename in _IN_BETWEEN_FILES:
        frame = frame.f_back
    return frame is None or _reads_values(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def _reads_values(code: CodeType, offset: int) -> bool:
    following = _instructions(code, offset)
    next(following, None)
    after = next(following, None)
    if after is None:
        return True
    if _is_variable(after, "STORE"):  # `for parameter in ...`
        uses = [*_after_loads(code, str(after.argval))]
        return not uses or not all(map(_is_fact, uses))
    return not _is_fact(after)


def _instructions(code: CodeType, offset: int = 0) -> Iterator[dis.Instruction]:
    """Those from the one at `offset` on. Since Python 3.12, a frame that runs a generator may be inside of one."""
    found = [one for one in dis.get_instructions(code) if one.opname not in _IN_BETWEEN]
    first = max((index for index, one in enumerate(found) if one.offset <= offset), default=0)
    return (part for one in found[first:] for part in _parts(one))


def _parts(instruction: dis.Instruction) -> Iterator[dis.Instruction]:
    """Since Python 3.13, one instruction may store or load two variables: STORE_FAST_LOAD_FAST."""
    first, is_both, second = instruction.opname.partition("_FAST_")
    if is_both and isinstance(instruction.argval, tuple):
        for opname, variable in zip((f"{first}_FAST", second), instruction.argval, strict=True):
            yield instruction._replace(opname=opname, argval=variable)
    else:
        yield instruction


def _is_fact(instruction: dis.Instruction | None) -> bool:
    is_access = instruction is not None and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
    return is_access and instruction is not None and instruction.argval in _FACTS


def _is_variable(instruction: dis.Instruction, kind: str) -> bool:
    return instruction.opname in (f"{kind}_FAST", f"{kind}_NAME", f"{kind}_DEREF")


def _after_loads(code: CodeType, name: str) -> Iterator[dis.Instruction | None]:
    """The instruction behind each one that loads the variable; None behind others that have to do with it."""
    before: dis.Instruction | None = None
    for one in _instructions(code):
        if before is not None and before.argval == name and not before.opname.startswith("STORE"):
            yield one if before.opname.startswith("LOAD_FAST") or _is_variable(before, "LOAD") else None
        elif before is not None and isinstance(before.argval, tuple) and name in before.argval:
            yield None
        before = one


def _some(names: Iterable[str], said: str | Callable[[str], str]) -> list[str]:
    """Lines of the report that say this of parameters: of all together beyond a few, as layers that torch checkpoints
    hold those of a whole model."""
    texts = [f"  parameter {name} {said if isinstance(said, str) else said(name)}" for name in names]
    more = len(texts) - _SHOWN
    return texts if more <= 0 else [*texts[:_SHOWN], f"  {more} more parameters like the one before"]
