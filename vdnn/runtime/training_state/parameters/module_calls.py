"""Follows the calls of modules: brings their parameters before a call, and drops them after it."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vdnn.errors import VdnnError
from vdnn.runtime.torch_internals import forks
from vdnn.runtime.torch_internals.backward_ends import in_backward
from vdnn.runtime.torch_internals.backward_inputs import find_inputs
from vdnn.runtime.torch_internals.cuda_graphs import keep_dynamo_out
from vdnn.runtime.torch_internals.data_reads import native_data, watch_data, watch_data_no_longer
from vdnn.runtime.torch_internals.hooks_of_others import give_hooks_memory
from vdnn.runtime.torch_internals.parameter_access import watch_parameters_of
from vdnn.runtime.torch_internals.saved_modes import DispatchModes
from vdnn.runtime.torch_internals.tensor_kinds import is_jit_traced, outside_of_transforms
from vdnn.runtime.torch_internals.tensor_swaps import watch_swaps
from vdnn.runtime.training_state.parameters.away_parameter import AwayParameter, is_held
from vdnn.runtime.training_state.parameters.graph_uses import GraphUses, next_sequence_number
from vdnn.runtime.training_state.parameters.streaming import Streaming
from vdnn.runtime.training_state.parameters.uses_between_calls import UsesBetweenCalls
from vdnn.runtime.training_state.parameters.value_reads import reads_values
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
        self._model = weakref.ref(model)  # it may be freed before the session that reports on it
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
        self._modes = DispatchModes()  # as the session was entered

    def __enter__(self) -> ModuleCalls:
        self._modes = DispatchModes()
        hooks = torch.nn.modules.module
        for handle in (
            hooks.register_module_forward_pre_hook(self._before),
            hooks.register_module_forward_hook(self._after, always_call=True),
            register_optimizer_step_pre_hook(self._refuse_late_writes),
            register_optimizer_step_post_hook(self._stepped),
        ):
            self._undo.append(handle.remove)
        model = self._model()
        for module in () if model is None else model.modules():
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
        without_others = self._modes.without_others()
        if without_others is not None:  # a selective checkpoint's counts operations, and would count ours
            with without_others:
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
        if in_backward():  # as for the modules of a checkpoint
            self._between.pause(self._parameters_read_by(module))
        else:
            self._between.end()
        self._running += 1
        called = self._called.get(module, 0)
        if not called:
            refuse_compiled(module, lambda part: any(id(one) in self._away for one in part.parameters()))
            for part in module.modules():
                self._look_into(part)
        self._called[module] = called + 1

    def _parameters_read_by(self, module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
        for part in module.modules():
            yield from (one for one in part._parameters.values() if one is not None)
            yield from (one.parameter for one in self._read_in.get(part, ()))

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
        without_others = self._modes.without_others()
        if without_others is not None:
            with without_others:
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
            if in_backward():
                self._between.resume()
            elif not self._running:
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
        if away is None or not self._calls.stack:
            return
        if in_backward():
            self._between.pause([parameter])
        if not away.users and reads_values(2):
            self._read(away)

    def _read(self, away: AwayParameter) -> None:
        """The module that runs reads a parameter of another one."""
        if torch.compiler.is_compiling() or forks.count != self._forks:
            return
        self._read_outside.add(away.name)
        with self._modes.without_others() or contextlib.nullcontext():
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

    # Between calls, see [Note: Between calls] in uses_between_calls.py.

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
                call.began_at = next_sequence_number()
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
        model = self._model()
        names = (name for name, one in (() if model is None else model.named_modules()) if one is module)
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
        only_known_modes = self._modes.without_others() or contextlib.nullcontext()
        with only_known_modes, outside_of_transforms(), self._streaming.lock, no_function_modes:
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


def refuse_compiled(model: torch.nn.Module, concerns: Callable[[torch.nn.Module], bool] = lambda _: True) -> None:
    """Raises if a part of `model` is compiled that has parameters that leave, as `concerns` tells."""
    for path, module in model.named_modules():
        is_compiled = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        if is_compiled and concerns(module):
            raise VdnnError(
                f"parameters: module {path or 'model'!r} is compiled, and compiled code reads parameters where no hook "
                "can bring them. Leave out parameters=, or do not compile it."
            )
        if isinstance(module, torch.jit.ScriptModule) and concerns(module):
            raise VdnnError(
                f"parameters: module {path or 'model'!r} is a TorchScript module, which reads parameters where no hook "
                "can bring them. Leave out parameters=, or give the module as it was before."
            )


for hook in (ModuleCalls._refuse_late_writes, ModuleCalls._stepped):
    keep_dynamo_out(hook)


def _some(names: Iterable[str], said: str | Callable[[str], str]) -> list[str]:
    """Lines of the report that say this of parameters: of all together beyond a few, as layers that torch checkpoints
    hold those of a whole model."""
    texts = [f"  parameter {name} {said if isinstance(said, str) else said(name)}" for name in names]
    more = len(texts) - _SHOWN
    return texts if more <= 0 else [*texts[:_SHOWN], f"  {more} more parameters like the one before"]
