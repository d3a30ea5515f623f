"""Keeps the parameters of one model on the host while a session manages it: the frozen ones, or the trained ones too.

Entering copies the parameters on the device to pinned memory; frozen parameters in mapped files are used where they
are. Leaving returns the parameters that were on the device. Parameters that cannot leave stay on the device and are
named in the report.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from vdnn.bytesize import format_bytes
from vdnn.errors import CombinationError, VdnnError
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.data_reads import native_data, set_native_data, watch_data_no_longer
from vdnn.runtime.torch_internals.gradient_hooks import hear_first, hear_incoming, is_node_watched
from vdnn.runtime.torch_internals.gradient_reads import put_gradient_on
from vdnn.runtime.torch_internals.local_shards import is_sharded
from vdnn.runtime.torch_internals.memory_holders import is_used_natively, memory_is_held, natively_held
from vdnn.runtime.torch_internals.tensor_kinds import has_plain_storage, outside_of_inference_mode, plain_part
from vdnn.runtime.training_state.homes import manage, manage_no_longer
from vdnn.runtime.training_state.host_tensor import HostTensor, host_tensor_for
from vdnn.runtime.training_state.interrupts import interrupts_wait
from vdnn.runtime.training_state.parameters.away_parameter import AwayParameter, away_of, holders_of
from vdnn.runtime.training_state.parameters.module_calls import ModuleCalls, refuse_compiled
from vdnn.runtime.training_state.parameters.packed_parameter import ParameterSaves
from vdnn.runtime.training_state.parameters.streaming import Streaming
from vdnn.runtime.training_state.parameters.writes import DEFAULT_ONE_IN, Writes
from vdnn.runtime.training_state.state_copies import StateCopies
from vdnn.runtime.training_state.state_tensors import is_dense
from vdnn.user_warnings import warn

TransportFor = Callable[[torch.device], Transport | None]
_SHOWN = 3
_HELD_BY_US = 2  # by the host tensor, and by the Python object that is asked


class GivenModel:
    """The model that a session was given. The session holds it until it is closed, because it may be a list of modules
    that nobody else holds. A closed one may be kept for its report, and the model be freed."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._held: torch.nn.Module | None = model
        self._reference = weakref.ref(model)

    def let_go(self) -> None:
        self._held = None

    def __call__(self) -> torch.nn.Module:
        model = self._reference()
        if model is None:
            raise VdnnError("the model of this session is gone. Open a session with the model that trains now.")
        return model


class ManagedParameters:
    """The parameters of `model`, managed by one session: the frozen ones, and with `are_trained` all of them."""

    def __init__(self, model: torch.nn.Module, *, are_trained: bool = False) -> None:
        self._model = GivenModel(model)
        self.are_trained = are_trained
        self._stay: dict[str, str] = {}
        self._away: dict[int, AwayParameter] = {}  # by id of the parameter
        self._streaming: Streaming | None = None
        self._entries = 0
        self._host_bytes = self._mapped_bytes = 0
        self._left: list[torch.Tensor] = []  # host copies of parameters that are no longer managed
        self._stack = contextlib.ExitStack()
        self._calls: ModuleCalls | None = None
        choose(model, 1)  # refuses what cannot be managed
        if are_trained:
            refuse_data_parallel(model)

    # Sessions.

    def let_go(self) -> None:
        """The session is closed: it holds the model no more."""
        self._model.let_go()

    def enter(
        self,
        transport_for: TransportFor,
        saves: ParameterSaves,
        min_bytes: int,
        trained: Iterable[torch.Tensor] = (),
        check_one_in: int = DEFAULT_ONE_IN,
    ) -> None:
        """Copies the parameters to the host, and watches the calls of modules. Blocks while memory is pinned. `trained`
        are those that the optimizers of the session have. `check_one_in`: see writes."""
        self._entries += 1
        if self._entries > 1:
            return
        try:
            with interrupts_wait():
                ids = frozenset(map(id, trained)) if self.are_trained else None
                self._take_out(transport_for, saves, min_bytes, ids, Writes(check_one_in))
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Returns the parameters to the device. Parameters that it refuses stay on the host, in memory that is not
        pinned."""
        self._entries -= 1
        if self._entries:
            return
        with interrupts_wait():
            refused_bytes = self._return_all()
        if refused_bytes:
            warn(
                f"{format_bytes(refused_bytes)} of the model's parameters stay on the host, because the device "
                "has no room for them. Use the model inside of a session, or move it with .to()."
            )

    def _return_all(self) -> int:
        self._stack.close()
        if self._streaming is not None:
            self._streaming.begin()
        refused_bytes = sum([self._return(one) for one in list(self._away.values())])
        for host in self._left:
            _outlive_the_memory(host)
        self._left.clear()
        return refused_bytes

    def lines(self) -> list[str]:
        """The lines of the report."""
        if self._streaming is None:
            return []
        fetches = self._streaming.fetches
        mapped = f", {format_bytes(self._mapped_bytes)} of it in mapped files" if self._mapped_bytes else ""
        name = "parameters" if self.are_trained else "frozen parameters"
        lines = [
            f"  {name}: {format_bytes(self._host_bytes)} on the host{mapped}; {fetches.copies} copies of "
            f"{format_bytes(fetches.nbytes)} to the device, {fetches.ahead} ahead of their use"
        ]
        if self._calls is not None:
            lines += self._calls.lines()
        shown = list(self._stay.items())[:_SHOWN]
        lines += [f"  parameter {name} stays on the device: {reason}" for name, reason in shown]
        if len(self._stay) > _SHOWN:
            lines.append(f"  {len(self._stay) - _SHOWN} more parameters stay on the device")
        return lines

    # Out and back.

    def _take_out(
        self,
        transport_for: TransportFor,
        saves: ParameterSaves,
        min_bytes: int,
        trained: frozenset[int] | None,
        writes: Writes,
    ) -> None:
        model = self._model()
        chosen = choose(model, min_bytes, trained)
        self._refuse_a_second_session([one.parameter for one in chosen.leave])
        self._stay = chosen.stay
        self._host_bytes = self._mapped_bytes = 0
        devices = {one.device for one in model.parameters() if one.device.type != "cpu"}
        copies: dict[torch.device, StateCopies] = {}
        mapped = MappedFiles()
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for leaving in chosen.leave:
                parameter = leaving.parameter
                target = parameter.device
                if target.type == "cpu" and len(devices) == 1:
                    (target,) = devices
                transport = transport_for(target)
                if transport is None:
                    self._stay[leaving.name] = "the session has no copies for its device"
                    continue
                is_trained = trained is not None and id(parameter) in trained
                if is_trained and parameter.device.type != transport.torch_device.type:
                    self._stay[leaving.name] = "it is trained, and was not on the device as the session began"
                    continue
                one = copies.setdefault(target, StateCopies(transport))
                is_mapped = not is_trained and native_data(parameter) in mapped
                if (
                    not is_mapped
                    and target == parameter.device
                    and (memory_is_held(parameter) or is_used_natively(parameter))
                ):
                    self._stay[leaving.name] = "the program holds its memory, such as in a state_dict or a view"
                    continue
                if is_trained and is_node_watched(parameter):
                    self._stay[leaving.name] = "the program has a hook on the node of its gradient"
                    continue
                self._take_one_out(leaving, one, is_mapped=is_mapped, is_trained=is_trained)
        window_bytes = min((one.window_bytes for one in copies.values()), default=0)
        fetches = None if self._streaming is None else self._streaming.fetches
        self._streaming = Streaming(saves, writes, window_bytes)
        if fetches is not None:
            self._streaming.fetches = fetches
        self._streaming.manage(self._away.values())
        saves.managed_by(self)
        self._calls = ModuleCalls(self._away, model, self._streaming, writes, self._let_stay)
        self._stack.enter_context(self._calls)
        if trained is not None:
            self._stack.callback(watch_data_parallel(one.parameter for one in self._away.values() if one.is_trained))

    def _refuse_a_second_session(self, parameters: list[torch.nn.Parameter]) -> None:
        for one in parameters:
            known = away_of(one)
            if known is not None and known.manager is not self:
                raise VdnnError(
                    "parameters of this model are managed by another session, which has not been left. One session "
                    "manages the parameters of a model at a time: give parameters= to one of them."
                )

    def _take_one_out(
        self, leaving: Leaving, copies: StateCopies, *, is_mapped: bool, is_trained: bool = False
    ) -> None:
        name, parameter = leaving.name, leaving.parameter
        transport, home = copies.transport, parameter.device
        if not torch._has_compatible_shallow_copy_type(parameter, torch.empty(0)):
            # As for Module.to(): CUDA's tensors can take the place of the CPU's, those of an extension cannot.
            self._stay[name] = f"torch cannot put a tensor of the CPU in the place of one of {home.type!r}"
            return
        if is_mapped:
            data = native_data(parameter)
            host = HostTensor(data, MappedBlock(data.data_ptr(), data.nbytes), transport)  # type: ignore[arg-type]
        else:
            data = native_data(parameter)
            whole = data if _is_whole(data) else data.clone()
            try:
                host = host_tensor_for(whole, transport)
            except (VdnnError, MemoryError):
                self._stay[name] = "memory of the host was refused"
                return
            if home.type == "cpu" and transport.torch_device.type != "cpu":
                host.tensor.copy_(whole)
            elif not copies.leave([whole], [host]):
                self._stay[name] = "its copy to the host was refused"
                return
            else:
                copies.finish()
            transport.state_bytes += host.nbytes
        is_at_home = not is_mapped and (home.type != "cpu" or transport.torch_device.type == "cpu")
        away = AwayParameter(
            name,
            len(self._away),
            leaving.owner,
            parameter,
            host,
            copies,
            self,
            is_mapped,
            home if is_at_home else None,
            is_trained,
            leaving.is_tied,
        )
        away.host_holders = holders_of(host.tensor)
        self._away[id(parameter)] = away
        manage(parameter, away)
        if is_trained and parameter.requires_grad:
            self._watch(away)
        self._host_bytes += host.nbytes
        self._mapped_bytes += host.nbytes if is_mapped else 0
        set_native_data(parameter, host.tensor)

    def _watch(self, away: AwayParameter) -> None:
        """Registers a hook on the gradient of `away`, ahead of all other hooks."""

        def arrives(gradient: torch.Tensor | None) -> None:
            if gradient is not None and gradient.device != away.device:  # a function may give none to its parameters
                raise VdnnError(
                    f"parameter {away.name} was read between calls of modules, on the host, and a gradient comes from "
                    "there. Read it in the first two calls of the model as well, so that it stays on the device, or "
                    "inside of a module."
                )

        def accumulated(parameter: torch.Tensor) -> None:
            put_gradient_on(parameter, away.device)
            if self._calls is not None and self._streaming is not None:
                with self._streaming.lock:
                    self._calls.uses.accumulated(away)

        parameter: Any = away.parameter
        away.handles += (hear_first(parameter, accumulated), hear_incoming(parameter, arrives))

    # For the room that they take, see state_room.py.

    @property
    def is_managing(self) -> bool:
        return self._entries > 0 and self._streaming is not None

    def bytes_away(self) -> list[tuple[int, int]]:
        """Each parameter on the host that could stay on the device: its id, and its bytes."""
        calls = self._calls
        if calls is None:
            return []
        could = [one for one in self._away.values() if not one.stays and not calls.is_read_between_calls(one)]
        return [(id(one.parameter), one.nbytes) for one in could]

    def ahead_bytes(self) -> int:
        """The most bytes of copies that are made ahead of their uses."""
        return 0 if self._streaming is None else self._streaming.ahead_bytes()

    def fetched(self) -> tuple[int, int]:
        """The bytes that calls and backwards have fetched, and the time in ns that compute has waited for them since
        `times_waits` was set."""
        if self._streaming is None:
            return 0, 0
        fetches = self._streaming.fetches
        for copies in {one.copies for one in self._away.values()}:
            fetches.waited_ns += copies.waited_ns()
        return fetches.nbytes, fetches.waited_ns

    def time_waits(self, *, are_timed: bool) -> None:
        if self._streaming is not None:
            self._streaming.times_waits = are_timed

    def keep(self, chosen: Container[int]) -> None:
        """Those with the `chosen` ids come to the device, and stay there until `take_out`. Nothing runs now."""
        streaming = self._streaming
        if streaming is not None:
            for one in [one for one in self._away.values() if id(one.parameter) in chosen]:
                streaming.keep(one)

    def take_out(self) -> None:
        """All that stay leave, as soon as they are not in use."""
        if self._streaming is not None:
            self._streaming.let_staying_go()

    # While optimizers step.

    def drop(self, away: AwayParameter) -> bool:
        if self._calls is None or self._streaming is None:
            return True
        with self._streaming.lock:
            if not self._calls.in_step(away):
                return False
            self._streaming.drop(away)
            return True

    def stay(self, away: AwayParameter, data: torch.Tensor, reason: str) -> None:
        self._stay[away.name] = reason
        set_native_data(away.parameter, data)
        self._forget(away)

    # The end of one.

    def let_all_stay(self, reason: str) -> None:
        if self._calls is not None and self._away:
            with interrupts_wait():
                self._calls.give_all_back(reason)

    def _let_stay(self, away: AwayParameter, reason: str) -> None:
        """`away` is on the device from now on, or stays where the program moved it."""
        self._stay[away.name] = reason
        self._return(away, is_to_be_used=True)

    def _return(self, away: AwayParameter, *, is_to_be_used: bool = False) -> int:
        """Ends the management of one parameter. Returns the bytes that the device refused. `is_to_be_used`: a mapped
        parameter is copied to the device, too."""
        refused_bytes = 0
        with outside_of_inference_mode(), torch.no_grad(), torch._C.DisableTorchFunction():
            goes_home = away.home is not None or is_to_be_used
            away.replaced += not (away.is_in_place or away.is_there())
            if away.is_in_place and not goes_home and self._calls is not None:
                self._calls.in_step(away)  # a copy that the program holds stays
            if not away.is_in_place and away.is_there():
                if self._streaming is not None:
                    self._streaming.drop(away)
                if goes_home:
                    try:
                        set_native_data(away.parameter, self._copied_back(away))
                    except (torch.OutOfMemoryError, VdnnError):
                        refused_bytes = away.nbytes
                        set_native_data(away.parameter, away.host.tensor.clone())
                elif not away.is_mapped:
                    set_native_data(away.parameter, away.host.tensor.clone())
        self._forget(away)
        return refused_bytes

    def _forget(self, away: AwayParameter) -> None:
        watch_data_no_longer(away.parameter)
        if self._calls is not None:
            self._calls.forget(away)
            away.users = 0
        if self._streaming is not None:
            self._streaming.forget(away)
        for handle in away.handles:
            handle.remove()
        del self._away[id(away.parameter)]
        manage_no_longer(away.parameter)
        if not away.is_mapped:
            away.copies.transport.state_bytes -= away.nbytes
            self._left.append(away.host.tensor)

    def _copied_back(self, away: AwayParameter) -> torch.Tensor:
        """A copy on the device that is complete, or ordered before the next work of the current stream."""
        moving = away.copies.fetch([away.host])
        away.copies.arrive_to_be_read(moving, "parameter returned")
        return moving.tensors[0]


def _is_held(parameter: torch.Tensor) -> bool:
    return memory_is_held(parameter) or is_used_natively(parameter)


def _outlive_the_memory(host: torch.Tensor) -> None:
    """Moves a host copy that others hold, such as a state_dict, to shared memory, because the pinned memory ends with
    the session. share_memory_() moves the bytes of a storage in place, for all of its views. An array of numpy keeps
    the old address, so this runs only when the session ends."""
    storage = host.untyped_storage()
    if not isinstance(host, FakeTensor) and natively_held(storage._cdata) > _HELD_BY_US:
        storage.share_memory_()


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes and not tensor.storage_offset()


# Chooses the parameters of a model that leave the device, and says why others stay.


@dataclass(frozen=True, slots=True)
class Leaving:
    """A parameter that leaves. `owner` is the position of the first module that has it."""

    name: str
    owner: int
    parameter: torch.nn.Parameter
    is_tied: bool  # several modules have it


@dataclass(slots=True)
class Chosen:
    """Parameters to offload, and the names of the parameters that stay, with the reasons."""

    leave: list[Leaving] = field(default_factory=list)
    stay: dict[str, str] = field(default_factory=dict)


def choose(model: torch.nn.Module, min_bytes: int, trained: frozenset[int] | None = None) -> Chosen:
    """The parameters without grad of at least `min_bytes`, and those whose ids are in `trained`. Tied ones count once,
    by their first name."""
    refuse_compiled(model)
    chosen = Chosen()
    tensors = [*model.parameters(), *model.buffers()]
    holders = Counter(part.untyped_storage()._cdata for one in tensors if (part := plain_part(one)) is not None)
    modules = Counter(id(one) for module in model.modules() for one in module._parameters.values())
    seen: set[int] = set()
    for owner, (path, module) in enumerate(model.named_modules()):
        for own_name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen or (parameter.requires_grad and trained is None):
                continue
            seen.add(id(parameter))
            name = f"{path}.{own_name}" if path else own_name
            if type(parameter) is not torch.nn.Parameter and not has_plain_storage(parameter):
                chosen.stay[name] = f"it is a {type(parameter).__name__}"
            elif not has_plain_storage(parameter):
                chosen.stay[name] = "it has no plain memory of its own"
            elif not parameter.dim() or parameter.nbytes < max(min_bytes, 1):
                continue  # small
            elif parameter.requires_grad and trained is not None and id(parameter) not in trained:
                chosen.stay[name] = "it is trained, and no optimizer of the session has it"
            elif holders[parameter.untyped_storage()._cdata] > 1:
                chosen.stay[name] = "it shares memory with another parameter or buffer"
            elif not is_dense(parameter):
                chosen.stay[name] = "its elements overlap or lie apart"
            else:
                chosen.leave.append(Leaving(name, owner, parameter, is_tied=modules[id(parameter)] > 1))
    return chosen


# Refuses trained parameters that leave under DDP or FSDP2.
#
# [Note: Who holds a gradient's node] DDP puts its hooks on the node of each parameter's gradient once, when it wraps
# the model. Torch makes another node when the data of the parameter move between devices, so DDP would never hear of a
# gradient again. Programs that reduce or scale gradients by themselves have hooks there as well: such a parameter stays
# on the device. FSDP2 gathers its shards from memory of its own, which does not know of a parameter's data on the
# host.

_WAY_OUT = "Use parameters='frozen', and gradients=True for the gradients"


def refuse_data_parallel(model: torch.nn.Module) -> None:
    """Raises CombinationError if DDP or FSDP2 has a part of `model`."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise _under_ddp()
    if any(map(is_sharded, model.parameters())):
        raise CombinationError(
            ours="parameters='all'",
            theirs="FSDP2 or another DTensor",
            reason="it gathers its shards from memory of its own, so they cannot be elsewhere",
            way_out=_WAY_OUT,
        )


def watch_data_parallel(parameters: Iterable[torch.Tensor]) -> Callable[[], object]:
    """Raises CombinationError before a module under DDP runs that has one of `parameters`. Returns what ends this."""
    ids = frozenset(map(id, parameters))

    def before(module: torch.nn.Module, args: object) -> None:
        if isinstance(module, DistributedDataParallel) and any(id(one) in ids for one in module.parameters()):
            raise _under_ddp()

    handle: Any = torch.nn.modules.module.register_module_forward_pre_hook(before)
    return handle.remove  # type: ignore[no-any-return]


def _under_ddp() -> CombinationError:
    return CombinationError(
        ours="parameters='all'",
        theirs="DistributedDataParallel",
        reason="torch replaces the nodes that have DDP's hooks when a parameter's data leave the device",
        way_out=_WAY_OUT,
    )


# Finds tensors whose memory is a private mapping of a file, such as a checkpoint that was loaded with mmap=True.
#
# Such memory is a host copy already: the pages are the file's, and a copy of them would be a second one.

_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True, eq=False)
class MappedBlock:
    """Memory of a file in place of a pinned block. Nothing writes to it, so nothing has to wait for its uses."""

    address: int
    bytes: int

    @property
    def last_uses(self) -> tuple[Any, ...]:
        return ()

    def note_use(self, event: object) -> None:
        """Nothing reuses this memory."""


class MappedFiles:
    """The files that are mapped into this process now. Empty where the system does not list them."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for line in _MAPS.read_text().splitlines() if _MAPS.exists() else []:
            span, access, _, _, inode, *path = line.split(maxsplit=5)
            if inode == "0" or not path or not access.endswith("p"):
                continue
            begin, end = (int(edge, 16) for edge in span.split("-"))
            if self._ends and self._ends[-1] == begin:  # one file, written to in parts
                self._ends[-1] = end
                continue
            self._begins.append(begin)
            self._ends.append(end)

    def __contains__(self, tensor: object) -> bool:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
            return False
        address = tensor.data_ptr()
        index = bisect.bisect_right(self._begins, address) - 1
        return index >= 0 and address + tensor.nbytes <= self._ends[index]
