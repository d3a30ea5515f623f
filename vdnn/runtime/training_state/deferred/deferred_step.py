"""One step of an optimizer that was called, and runs slice by slice when its parameters are next needed.

It has the inputs of the call: options of the groups, numbers of the optimizer, gradients, and modes of torch. While a
slice is stepped these are in place; afterwards the program's are again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vdnn.errors import VdnnError
from vdnn.runtime.torch_internals.saved_modes import SavedModes
from vdnn.runtime.training_state.deferred.taken_gradients import TakenGradients
from vdnn.runtime.training_state.device_steps import Coming, DeviceSteps
from vdnn.runtime.training_state.sliced_step import SlicedStep, interruption_message
from vdnn.runtime.training_state.slices import Slice, options_of

_AHEAD = 2  # slices that are fetched beside the one that is stepped


class DeferredStep:
    """The step that `sliced` is, of `slices`, in the order of their use. `steps` runs them with `gradients`.

    `stepped_before` parameters of the step are stepped already."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sliced: SlicedStep,
        slices: list[Slice],
        gradients: TakenGradients,
        steps: DeviceSteps,
        stepped_before: int,
    ) -> None:
        self._optimizer = optimizer
        self._sliced = sliced
        self._steps = steps
        self._slices = dict(enumerate(slices))  # that are not stepped yet, by number
        self._numbers = {id(one): number for number, part in enumerate(slices) for one in part.all_parameters()}
        self._coming: dict[int, Coming] = {}
        self._modes = SavedModes({part.device.type for part in slices if part.device is not None})
        self.gradients = gradients
        self._stepped = stepped_before
        self._total = stepped_before + len(self._numbers)
        sliced.keep_values()

    # The slices that are not stepped yet.

    def parameters(self) -> Iterator[torch.Tensor]:
        for part in self._slices.values():
            yield from part.all_parameters()

    def has(self, parameter: torch.Tensor) -> bool:
        return self._numbers.get(id(parameter)) in self._slices

    @property
    def is_over(self) -> bool:
        return not self._slices

    # Steps.

    def part_with(self, parameter: torch.Tensor) -> Slice:
        """The slice that `step` will step for `parameter`."""
        return self._slices[self._numbers[id(parameter)]]

    def step(self, parameter: torch.Tensor) -> None:
        """Steps the slice that has `parameter`. If its copies cannot come, nothing has changed."""
        number = self._numbers[id(parameter)]
        part = self._slices[number]
        coming = self._coming.pop(number, None) or self._fetched(part)
        parameters = part.all_parameters()
        with self._modes.restored(), self._as_it_was_called(), self.gradients.in_place(parameters):
            del self._slices[number]
            try:
                self._steps.step_one(self._sliced, part, coming)
            except Exception as error:
                message = interruption_message(self._optimizer, self._stepped, self._total, error)
                raise VdnnError(message) from error
            self._stepped += len(parameters)

    def fetch_ahead(self) -> None:
        """Issues copies for the slices that come next, as far as there is room."""
        for number in list(self._slices)[:_AHEAD]:
            if number not in self._coming:
                try:
                    with self._modes.restored():
                        self._coming[number] = self._steps.fetch(self._slices[number], all_step=True)
                except torch.OutOfMemoryError:
                    return  # it is fetched when it is needed

    def _fetched(self, part: Slice) -> Coming:
        with self._modes.restored():
            try:
                return self._steps.fetch(part, all_step=True)
            except torch.OutOfMemoryError:
                if not self._coming:
                    raise
            self.give_up_ahead()
            return self._steps.fetch(part, all_step=True)

    def give_up_ahead(self) -> None:
        """Releases tensors that were fetched and not used."""
        coming, self._coming = list(self._coming.values()), {}
        for one in coming:
            with contextlib.suppress(VdnnError):  # the device is lost, which the next call says
                self._steps.abandon(one)

    def give_back(self) -> None:
        """Gives the program the gradients of the parameters that are not stepped yet."""
        for parameter in self.parameters():
            self.gradients.give_back(parameter)

    # As it was when the step was called.

    @contextlib.contextmanager
    def _as_it_was_called(self) -> Iterator[None]:
        """Brings back the options of the groups and the numbers of the optimizer that the program has now."""
        optimizer, groups = self._optimizer, self._sliced.groups
        attributes, own = vars(optimizer), {"state", "param_groups"}
        now = {name: value for name, value in attributes.items() if name not in own}
        groups_now: Any = optimizer.param_groups
        options = [options_of(group) for group in groups]
        try:
            yield
        finally:
            optimizer.param_groups = groups_now
            for name in self._sliced.names_of_attributes():
                if name in now:
                    attributes[name] = now[name]
                else:
                    attributes.pop(name, None)
            for group, were in zip(groups, options, strict=True):
                for added in set(group) - set(were) - _LISTS:
                    del group[added]
                group.update(were)


_LISTS = {"params", "param_names"}
