"""Parameters that are away come to the device for the step of their slice, and the stepped ones leave behind it.

The host copy is written once the slice was stepped, in the place from which the values came. So there is one copy of
each byte. If the driver refuses that copy, the parameter stays on the device from then on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vdnn.runtime.torch_internals.data_reads import native_data, set_native_data
from vdnn.runtime.torch_internals.parameter_guard import guard_no_longer
from vdnn.runtime.training_state.parameters.away_parameter import AwayParameter, away_of
from vdnn.runtime.training_state.state_copies import StateCopies, StateCopy


class SteppedParameters:
    """The parameters of one slice that are away. They come with `fetch`, are used after `lend`, and leave with
    `take_back`."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._away = [away for one in parameters if (away := away_now(one)) is not None]
        self._moving: StateCopy | None = None
        self._lent: list[torch.Tensor] = []

    def fetch(self, copies: StateCopies) -> None:
        """Issues copies to the device."""
        if self._away:
            hosts = [away.host for away in self._away]
            copies.order_behind_uses(hosts)
            self._moving = copies.fetch(hosts)

    def abandon(self, copies: StateCopies) -> None:
        """Releases copies that were not stepped."""
        moving, self._moving = self._moving, None
        for away, _ in zip(self._away, self._lent, strict=False):
            away.put_host_in_place()
            away.is_stepped = False
        self._lent.clear()
        if moving is not None:
            copies.abandon(moving)

    def lend(self, copies: StateCopies) -> None:
        """Puts the copies in the place of the host's. The optimizer may change them."""
        moving = self._moving
        if moving is None:
            return
        copies.arrive(moving)
        self._moving = None
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for away, tensor in zip(self._away, moving.tensors, strict=True):
                set_native_data(away.parameter, tensor)
                away.is_stepped = True
                self._lent.append(tensor)
        moving.tensors.clear()

    def take_back(self, copies: StateCopies) -> None:
        """Issues copies to the host, and puts the host's in their place."""
        lent, self._lent = self._lent, []
        if not lent:
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for away, tensor in zip(self._away, lent, strict=True):
                away.is_stepped = False
                data = native_data(away.parameter)
                if data.untyped_storage()._cdata != tensor.untyped_storage()._cdata:  # the optimizer replaced them
                    tensor.copy_(data)
                    set_native_data(away.parameter, tensor)
            if copies.leave(lent, [away.host for away in self._away]):
                for away in self._away:
                    away.put_host_in_place()
                return
            for away, tensor in zip(self._away, lent, strict=True):
                away.manager.stay(away, tensor, "its copy to the host was refused after a step")


def away_now(parameter: torch.Tensor) -> AwayParameter | None:
    """`parameter` if its data are on the host. An earlier copy on the device is dropped. If it is in use, the step
    is made there. A parameter that the program moved stays on its device."""
    away = away_of(parameter)
    if away is None:
        return None
    guard_no_longer(parameter)  # it is not the program that reads it
    if not away.is_there():
        away.replaced += 1
        away.manager.stay(away, native_data(parameter), "it was moved or replaced")
        return None
    return away if away.manager.drop(away) else None
