"""Steps an optimizer on the device, slice after slice: state, gradients and parameters that are away come ahead of the
slice that needs them, and leave behind it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from vdnn.errors import VdnnError
from vdnn.runtime.training_state.away_gradients import gradient_anywhere
from vdnn.runtime.training_state.host_tensor import HostTensor
from vdnn.runtime.training_state.parameters.stepped_parameters import SteppedParameters
from vdnn.runtime.training_state.sliced_step import SlicedStep
from vdnn.runtime.training_state.slices import Slice
from vdnn.runtime.training_state.state_copies import StateCopies, StateCopy
from vdnn.runtime.training_state.state_tensors import TensorPlace, bytes_of_first_state, places_in, temporary_bytes

CopiesFor = Callable[[torch.device | None], StateCopies | None]
# Sends the state of parameters to the host. Its dict has the host tensors of fetched state, by the id of the tensor on
# the device.
Leave = Callable[[list[torch.Tensor], StateCopies, dict[int, HostTensor]], None]


class Gradients(Protocol):
    """Gradients of a step that are on the host."""

    def has(self, parameter: torch.Tensor) -> bool: ...
    def fetch(self, parameters: list[torch.Tensor]) -> StateCopy: ...
    def put_back(self, parameters: list[torch.Tensor], moving: StateCopy) -> None: ...
    def abandon(self, moving: StateCopy) -> None: ...
    def take_away(self, parameters: Iterable[torch.Tensor]) -> None: ...


@dataclass(slots=True)
class Coming:
    """A slice whose state and gradients are on their way."""

    copies: StateCopies | None
    places: list[TensorPlace] = field(default_factory=list)
    state: StateCopy | None = None
    away: SteppedParameters = field(default_factory=lambda: SteppedParameters(()))
    with_gradient: list[torch.Tensor] = field(default_factory=list)
    gradients: StateCopy | None = None


class DeviceSteps:
    """One step of an optimizer. `hosts` are the host tensors of its state, by id of the tensor."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        copies_for: CopiesFor,
        hosts: dict[int, HostTensor],
        gradients: Gradients,
        leave: Leave,
        is_stray: Callable[[torch.Tensor, TensorPlace], bool],
        release_what_left: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._copies_for = copies_for
        self._hosts = hosts
        self._gradients = gradients
        self._leave = leave
        self._is_stray = is_stray  # on the host, and has to be on the device for the step
        self._release_what_left = release_what_left
        self._ahead: deque[Coming] = deque()  # fetched, and not used yet
        self._makes_state = True  # the first step of a parameter does, as far as is known

    def steps(self, sliced: SlicedStep, slices: list[Slice]) -> Iterator[Slice]:
        """Yields each slice before its parameters change."""
        for number, part in enumerate(slices):
            if not self._ahead:
                self._has_room_for(part)
                self._ahead.append(self.fetch(part))
            if number + 1 < len(slices) and self._has_room_for(slices[number + 1], beside=part):
                with contextlib.suppress(torch.OutOfMemoryError):  # there is room once this slice has left
                    self._ahead.append(self.fetch(slices[number + 1]))
            yield part
            self.step_one(sliced, part, self._ahead.popleft())

    def _has_room_for(self, part: Slice, beside: Slice | None = None) -> bool:
        """True if the budget has room to fetch a slice while one is stepped: that one itself, or the one before. The
        first step also makes state. Slices that have left make room first."""
        copies = self._copies_for(part.device)
        stepped = part if beside is None else beside
        needed_bytes = part.nbytes + temporary_bytes(stepped.all_parameters())
        if beside is not None and self._makes_state:
            without = [one for one in beside.all_parameters() if not self._optimizer.state.get(one)]
            needed_bytes += sum(bytes_of_first_state(one, min_bytes=0) for one in without)
        if copies is None or copies.transport.fits(needed_bytes):
            return True
        self._release_what_left()
        return copies.transport.fits(needed_bytes)

    def give_up(self) -> None:
        """Releases tensors that were fetched and not used."""
        with contextlib.suppress(VdnnError):  # the device is lost, which the first error says
            while self._ahead:
                self.abandon(self._ahead.popleft())

    def fetch(self, part: Slice, *, all_step: bool = False) -> Coming:
        """Issues copies of the state and the gradients of `part` to the device. `all_step`: no parameter is without a
        gradient, though that may not be there yet."""
        coming = Coming(self._copies_for(part.device))
        if coming.copies is None:
            return coming
        parameters = [one for one in part.all_parameters() if all_step or gradient_anywhere(one) is not None]
        for one in parameters:
            for place in places_in(self._optimizer.state.get(one)):
                if id(place.tensor) in self._hosts:
                    coming.places.append(place)
                elif self._is_stray(one, place):
                    place.put(place.tensor.to(part.device))
        coming.with_gradient = [one for one in parameters if self._gradients.has(one)]
        coming.away = SteppedParameters(parameters)
        try:
            coming.away.fetch(coming.copies)
            if coming.places:
                coming.state = coming.copies.fetch([self._hosts[id(place.tensor)] for place in coming.places])
            if coming.with_gradient:
                coming.gradients = self._gradients.fetch(coming.with_gradient)
        except BaseException:
            self.abandon(coming)
            raise
        return coming

    def abandon(self, coming: Coming) -> None:
        """Releases what came and was not used."""
        if coming.copies is not None:
            coming.away.abandon(coming.copies)
        if coming.state is not None and coming.copies is not None:
            coming.copies.abandon(coming.state)
        if coming.gradients is not None:
            self._gradients.abandon(coming.gradients)

    def step_one(self, sliced: SlicedStep, part: Slice, coming: Coming) -> None:
        """Steps `part`, for which `fetch` returned `coming`, and offloads its tensors."""
        fetched = dict[int, HostTensor]()
        try:
            self._put_in_place(coming, fetched)
        except BaseException:
            with contextlib.suppress(VdnnError):  # the device is lost, which the first error says
                self.abandon(coming)
            raise
        try:
            sliced.step(part)
            self._makes_state = any(self._optimizer.state.get(one) for one in part.all_parameters())
        finally:
            if coming.copies is not None:
                coming.state = None  # the slice's tensors are released as they leave
                try:
                    self._leave(part.all_parameters(), coming.copies, fetched)
                    self._gradients.take_away(part.all_parameters())
                finally:
                    coming.away.take_back(coming.copies)

    def _put_in_place(self, coming: Coming, fetched: dict[int, HostTensor]) -> None:
        if coming.copies is not None:
            coming.away.lend(coming.copies)
        if coming.gradients is not None:
            self._gradients.put_back(coming.with_gradient, coming.gradients)
            coming.gradients = None
        if coming.state is not None and coming.copies is not None:
            coming.copies.arrive(coming.state)
            for place, tensor, host in zip(coming.places, coming.state.tensors, coming.state.hosts, strict=True):
                place.put(tensor)
                fetched[id(tensor)] = host
        coming.places = []  # they hold the host tensors, and `_leave` asks who else does
