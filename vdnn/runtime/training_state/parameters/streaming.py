"""Brings managed parameters to the device ahead of their uses, and drops them after.

A copy on the device is dropped as soon as another module's parameters are used and no running module has it; all of
them are dropped when the outermost module call ends, when a backward ends, and before the next call begins. So between
these every parameter is on the host, and a program that writes to it there is read by the next use.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vdnn.runtime.torch_internals.backward_ends import call_after_backward
from vdnn.runtime.torch_internals.data_reads import native_data
from vdnn.runtime.torch_internals.tensor_kinds import outside_of_inference_mode, outside_of_transforms
from vdnn.runtime.training_state.parameters.away_parameter import AwayParameter
from vdnn.runtime.training_state.parameters.packed_parameter import ParameterSaves
from vdnn.runtime.training_state.parameters.writes import Writes
from vdnn.runtime.training_state.state_copies import StateCopies, StateCopy

_BACKWARD = "backward"


@dataclass(slots=True)
class Fetches:
    """Counts for the report."""

    copies: int = 0
    ahead: int = 0
    nbytes: int = 0
    waited_ns: int = 0  # by compute, while waits are timed


class Streaming:
    """The copies on the device of the parameters of one session. Its methods run on any thread."""

    def __init__(self, saves: ParameterSaves, writes: Writes, window_bytes: int) -> None:
        self.let_go: Callable[[AwayParameter], bool] = lambda away: True  # True: its data are on the host now
        self.adopt: Callable[[AwayParameter], bool] = lambda away: True  # called for data that the program replaced
        self.before_use_in_place: Callable[[AwayParameter], None] = lambda away: None
        self.before_backward: Callable[[], None] = lambda: None
        self._writes = writes
        self.fetches = Fetches()
        self.lock = threading.RLock()
        self._saves = saves
        self._window_bytes = window_bytes
        self._ahead_bytes: int | None = None  # None: it has to be computed anew
        self._order = UseOrder()
        self._fetched: dict[int, AwayParameter] = {}  # by number: those with a copy on the device, or on its way
        self._known: dict[int, AwayParameter] = {}  # by number
        self._staying: dict[int, AwayParameter] = {}  # by number: not among those that are fetched
        self.times_waits = False
        self._backward_ends = False  # a backward runs that calls `drop_unused` at its end
        self._newest: tuple[StateCopies, StateCopy] | None = None  # the last copy that was issued

    def manage(self, parameters: Iterable[AwayParameter]) -> None:
        self._known = {one.number: one for one in parameters}
        self._ahead_bytes = None

    def forget(self, away: AwayParameter) -> None:
        """Ends the management of `away`. Its copy on the device lives as long as somebody holds it. A copy that is in
        flight has no holders yet: its memory is not reused before the copy is over."""
        self._known.pop(away.number, None)
        self._ahead_bytes = None
        self._fetched.pop(away.number, None)
        self._staying.pop(away.number, None)
        self._saves.remove(away)
        moving = away.on_device
        if moving is not None and not away.has_arrived:
            away.on_device = None
            away.copies.abandon(moving)

    # Uses.

    def use(self, parameters: list[AwayParameter], phase: Hashable) -> None:
        """The current stream may use the copies of `parameters` from now on. Their data are still on the host."""
        with self.lock, outside_of_transforms(), _ordinary_tensors():
            used = {one.number for one in parameters}
            owners = {one.owner for one in parameters}
            for one in list(self._fetched.values()):
                is_wanted = one.number in used or not one.has_arrived or one.owner in owners
                if not one.users and not is_wanted:
                    self.drop(one)
            for one in parameters:
                if not one.is_in_place and one.parameter._version != one.version:
                    self.drop(one)  # the host copy was written to since
                self._fetch(one, is_ahead=False, together=parameters)
                self._arrive(one)
                if not one.stays:
                    self._order.used(phase, one.number)
            self._fetch_ahead()

    def use_saved(self, away: AwayParameter, *, is_present: bool) -> torch.Tensor:
        """The copy on the device of a parameter that a backward uses. `is_present`: it uses the data that the parameter
        has now, also if the program replaced them."""
        with self.lock:
            if is_present and away.number in self._known and not (away.is_stepped or away.is_there()):
                self.adopt(away)
            if away.number not in self._known:
                return native_data(away.parameter)  # it went back to the device
            if not self._backward_ends:
                self._backward_ends = call_after_backward(self._backward_ended)
                self.before_backward()
            with _ordinary_tensors():
                self.before_use_in_place(away)
            if not away.stays:
                self.use([away], _BACKWARD)
            moving = away.on_device
            return native_data(away.parameter) if moving is None else moving.tensors[0]

    def _backward_ended(self) -> None:
        with self.lock:
            self._backward_ends = False
            self.drop_unused()

    def begin(self) -> None:
        """Nothing runs: whatever is still on the device is dropped, such as after an exception."""
        with self.lock:
            self._backward_ends = False
            for one in list(self._fetched.values()):
                one.users = int(one.is_held)
            self.drop_unused()

    def drop_unused(self) -> None:
        with self.lock:
            for one in list(self._fetched.values()):
                if not one.users:
                    self.drop(one)
            self._order.begin(None)
            newest, self._newest = self._newest, None
            if newest is not None:
                copies, moving = newest
                copies.settle(moving)  # from now on the program may write to the host copies

    def ahead_bytes(self) -> int:
        """The most bytes of copies that are made ahead of their uses. A plan leaves them free, so they are used where
        one parameter is much larger than others, too."""
        if self._ahead_bytes is None:
            streamed = [one.nbytes for one in self._known.values() if not one.stays]
            self._ahead_bytes = min(sum(streamed), max(self._window_bytes, *streamed)) if streamed else 0
        return self._ahead_bytes

    # Parameters that stay, see state_room.py. Nothing runs as they begin to.

    def keep(self, away: AwayParameter) -> None:
        """The copy on the device is the parameter's memory, in use or not, until `let_staying_go`."""
        with self.lock, outside_of_transforms(), _ordinary_tensors():
            if away.stays or away.users or away.is_in_place or not away.is_there() or away.is_held_on_host():
                return
            self.drop(away)  # the host copy may have been written to since it was fetched
            self._fetch(away, is_ahead=True)  # if the device has no memory for it, it is still moved
            self._arrive(away)
            if away.on_device is not None:
                away.put_in_place(away.on_device)
                self._writes.use_begins(away)
                away.stays = True
                self._ahead_bytes = None
                self._staying[away.number] = self._fetched.pop(away.number)

    def let_staying_go(self, about_to_be_used: Sequence[AwayParameter] = ()) -> None:
        """They leave, except those that are in use, which leave behind it."""
        with self.lock:
            staying, self._staying = list(self._staying.values()), {}
            self._ahead_bytes = None
            for one in staying:
                one.stays = False
                self._fetched[one.number] = one
                self._writes.take_home(one)
                if not one.users and one not in about_to_be_used:
                    self.drop(one)

    # Copies.

    def _fetch(self, away: AwayParameter, *, is_ahead: bool, together: Sequence[AwayParameter] = ()) -> None:
        """`together`: the parameters that are used at the same time."""
        if away.on_device is not None:
            return
        away.has_arrived, away.version = False, away.parameter._version
        try:
            away.on_device = away.fetched()
        except (torch.OutOfMemoryError, MemoryError):
            if is_ahead:
                return
            self.let_staying_go(together)
            for one in list(self._fetched.values()):
                if not one.users and one not in together:
                    self.drop(one)
            away.on_device = away.fetched()
        self._newest = away.copies, away.on_device
        self._fetched[away.number] = away
        self.fetches.copies += 1
        self.fetches.ahead += is_ahead
        self.fetches.nbytes += away.nbytes

    def _arrive(self, away: AwayParameter) -> None:
        moving = away.on_device
        if moving is None or away.has_arrived:
            return
        away.copies.arrive_to_be_read(moving, "parameter", is_timed=self.times_waits)
        away.has_arrived = True
        away.copy_version = moving.tensors[0]._version
        away.native_address = moving.tensors[0].untyped_storage()._cdata
        self._saves.add(away, self)

    def _fetch_ahead(self) -> None:
        waiting = [one for one in self._fetched.values() if not one.has_arrived]
        ahead_bytes = sum(one.nbytes for one in waiting)
        expected: set[int] = set()
        most_bytes = self.ahead_bytes()
        for number in self._order.predicted():
            one = self._known.get(number)
            if one is None or number in expected:
                break
            expected.add(number)
            if one.on_device is not None or one.is_held_on_host():
                continue  # the program may write to what it holds
            if ahead_bytes and ahead_bytes + one.nbytes > most_bytes:
                break
            ahead_bytes += one.nbytes
            self._fetch(one, is_ahead=True)
        for one in waiting:
            if one.number not in expected:  # the order is another one now
                self.drop(one)

    def drop(self, away: AwayParameter) -> None:
        """Releases the copy on the device, unless it is the parameter's memory, see [Note: One memory]. Writes to it
        are kept. The memory is not reused before the copy and all issued uses are over."""
        with self.lock, torch._C.DisableTorchFunction():
            if (away.is_in_place and not self.let_go(away)) or away.on_device is None:
                return
            if away.has_arrived:
                self._writes.use_ends(away, lambda: "a backward")
            moving, away.on_device = away.on_device, None
            self._fetched.pop(away.number, None)
            self._saves.remove(away)
            away.copies.drop(moving, "parameter")


@contextlib.contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Copies outlive the context that the program is in: no tensors of inference mode, no graph, no modes."""
    with outside_of_inference_mode(), torch.no_grad(), torch._C.DisableTorchFunction():
        yield


# Predicts which parameters are used next, from the order in which they were used before.
#
# A prediction is the use that followed these two uses last time, in the same phase: a call of a model, or a backward.
# It stops at the end of the phase, so nothing is fetched ahead while the program may write to parameters.


class UseOrder:
    """Numbers stand for parameters. Memory is bounded by the distinct pairs of uses."""

    def __init__(self) -> None:
        self._after: dict[tuple[Hashable, int | None, int], int] = {}
        self._phase: Hashable = None
        self._before: int | None = None
        self._last: int | None = None

    def begin(self, phase: Hashable) -> None:
        self._phase, self._before, self._last = phase, None, None

    def used(self, phase: Hashable, number: int) -> None:
        if phase != self._phase:
            self.begin(phase)
        if number == self._last:
            return
        if self._last is not None:
            self._after[self._phase, self._before, self._last] = number
        self._before, self._last = self._last, number

    def predicted(self) -> Iterator[int]:
        """The uses after the last one, the next one first."""
        before, last, phase = self._before, self._last, self._phase
        while last is not None:
            following = self._after.get((phase, before, last))
            if following is None:
                return
            yield following
            before, last = last, following
