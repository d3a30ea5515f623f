"""Loads a saved state in parts, so that the device never holds all of it.

load_state_dict() makes every tensor on the device of its parameter, which is the room that a session does not have.
Here it runs once for each part of the state, and each part leaves before the next one is loaded. Hooks run once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vdnn.runtime.training_state.homes import device_of, is_managed
from vdnn.runtime.training_state.state_tensors import places_in

_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


class LoadsInParts:
    """Watches `load_state_dict` of one optimizer. `take_out_part` moves to the host what was loaded, and `take_out`
    does so when all of it is there."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        take_out_part: Callable[[], None],
        take_out: Callable[[], None],
        part_bytes: Callable[[], int],
    ) -> None:
        self._take_out_part = take_out_part
        self._take_out = take_out
        self._part_bytes = part_bytes
        self._loaded: list[tuple[torch.Tensor, Any]] = []
        self._handles = (
            optimizer.register_load_state_dict_pre_hook(self._before),
            optimizer.register_load_state_dict_post_hook(self._after, prepend=True),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any] | None:
        *parts, last = list(_parts_of(saved.get("state", {}), self._part_bytes())) or [{}]
        self._loaded = []
        before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
        hooks = {name: getattr(optimizer, name) for name in _HOOKS}
        try:
            vars(optimizer).update({name: OrderedDict() for name in _HOOKS})
            for part in parts:
                torch.optim.Optimizer.load_state_dict(optimizer, {**saved, "state": part})
                self._take_out_part()
                self._loaded += optimizer.state.items()
        except BaseException:
            vars(optimizer).update(before)
            self._loaded = []
            raise
        finally:
            vars(optimizer).update(hooks)
        return {**saved, "state": last}

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        loaded, self._loaded = self._loaded, []
        rest = list(optimizer.state.items())
        optimizer.state.clear()
        optimizer.state.update(loaded + rest)
        self._take_out()


def put_where_it_computes(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Moves loaded state of a parameter that is on the host to the device where it computes, as torch does for one that
    is there: all tensors, but counts of steps only for optimizers that have them on the device."""
    if not is_managed(parameter):
        return
    device = device_of(parameter)
    group = next(one for one in optimizer.param_groups if any(parameter is other for other in one["params"]))
    has_counts_there = bool(group.get("capturable") or group.get("fused"))
    for place in places_in(optimizer.state.get(parameter)):
        if place.tensor.device == parameter.device != device and (place.key != "step" or has_counts_there):
            place.put(place.tensor.to(device))


def _parts_of(state: dict[Any, Any], limit_bytes: int) -> Iterator[dict[Any, Any]]:
    part: dict[Any, Any] = {}
    part_bytes = 0
    for name, value in state.items():
        nbytes = sum(place.tensor.nbytes for place in places_in(value))
        if part and part_bytes + nbytes > limit_bytes:
            yield part
            part, part_bytes = {}, 0
        part[name] = value
        part_bytes += nbytes
    if part:
        yield part
