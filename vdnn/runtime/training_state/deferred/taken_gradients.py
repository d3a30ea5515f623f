"""The gradients of a step that was called, until its slices run.

The step takes them over: nobody else may hold them, and the program and the next backward begin anew. Those on the
device stay there. Those that are away stay on the host and come with their slice, with the changes that clipping noted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from vdnn.runtime.torch_internals.gradient_reads import native_gradient, set_native_gradient
from vdnn.runtime.training_state.away_gradients import AwayGradients
from vdnn.runtime.training_state.gradient_copies import GradientOnHost
from vdnn.runtime.training_state.homes import device_of
from vdnn.runtime.training_state.state_copies import StateCopy


class TakenGradients:
    """The gradients of `parameters`. `away` has gradients on the host, and all that later backwards make."""

    def __init__(self, away: AwayGradients, parameters: Iterable[torch.Tensor]) -> None:
        self._away = away
        self._here: dict[int, torch.Tensor | None] = {}  # by id of the parameter
        self._on_host: dict[int, GradientOnHost] = {}
        self._dropped: set[int] = set()  # ids of parameters whose gradient the program has dropped or replaced
        for parameter in parameters:
            gradient = away.hand_over(parameter)
            if gradient is not None:
                self._on_host[id(parameter)] = gradient
                continue
            self._here[id(parameter)] = native_gradient(parameter)
            set_native_gradient(parameter, None)

    # The program.

    def peek(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient, on the device or the host. For its metadata only: shape, dtype, layout."""
        on_host = self._on_host.get(id(parameter))
        return self._here.get(id(parameter)) if on_host is None else on_host.host.tensor

    def drop(self, parameter: torch.Tensor) -> None:
        """The program is done with the gradient. The step is not."""
        self._dropped.add(id(parameter))

    def is_dropped(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._dropped

    # Slices. Copies are those of `DeviceSteps`.

    def has(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._on_host

    def fetch(self, parameters: list[torch.Tensor]) -> StateCopy:
        hosts = [self._on_host[id(one)].host for one in parameters]
        return self._away.copies.fetch(device_of(parameters[0]), hosts)

    def put_back(self, parameters: list[torch.Tensor], moving: StateCopy) -> None:
        """Gives the parameters the gradients that were fetched for them."""
        self._away.copies.arrive(moving, [self._on_host[id(one)].changes for one in parameters])
        for parameter, gradient in zip(parameters, moving.tensors, strict=True):
            self._here[id(parameter)] = gradient
            set_native_gradient(parameter, gradient)
            self._release(parameter)
        moving.tensors.clear()

    def abandon(self, moving: StateCopy) -> None:
        self._away.copies.abandon(moving)

    def take_away(self, parameters: Iterable[torch.Tensor]) -> None:
        """Nothing leaves yet: it is the program's again first, see `in_place`."""

    @contextlib.contextmanager
    def in_place(self, parameters: list[torch.Tensor]) -> Iterator[None]:
        """Inside, `parameters` have the gradients of the step. Then they are the program's again, unless it dropped
        them, and leave if they were away."""
        since = {id(one): self._made_since(one) for one in parameters}
        for one in parameters:
            set_native_gradient(one, self._here.get(id(one)))
        try:
            yield
        finally:
            for one in parameters:
                set_native_gradient(one, since.pop(id(one)))
                self.give_back(one)

    # Gradients that were not stepped.

    def give_back(self, parameter: torch.Tensor) -> None:
        """Gives the gradient back to the program, with the gradients of backwards after the call of the step added."""
        on_host = self._on_host.get(id(parameter))
        if on_host is not None and self.is_dropped(parameter):
            self._release(parameter)
        elif on_host is not None and self._made_since(parameter) is None:
            self._away.take_over(parameter, self._on_host.pop(id(parameter)))
        elif on_host is not None:
            moving = self.fetch([parameter])
            self._away.copies.arrive(moving, [on_host.changes])
            self._here[id(parameter)] = moving.tensors[0]
            moving.tensors.clear()
            self._release(parameter)
        self._add(parameter)
        self._away.take_away([parameter])

    def _made_since(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient that a backward made after the call of the step, on the device."""
        self._away.bring_back_one(parameter)
        return native_gradient(parameter)

    def _add(self, parameter: torch.Tensor) -> None:
        gradient, since = self._here.pop(id(parameter), None), native_gradient(parameter)
        if id(parameter) in self._dropped or gradient is None:
            return
        if since is None:
            set_native_gradient(parameter, gradient)
            return
        # As autograd adds a gradient to one that is there.
        with torch.set_grad_enabled(since.requires_grad):
            set_native_gradient(parameter, gradient + since if since.requires_grad else gradient.add_(since))

    def _release(self, parameter: torch.Tensor) -> None:
        self._away.release(self._on_host.pop(id(parameter)))
