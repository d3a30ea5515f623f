"""Finds the tensors in an optimizer's state, and which of them may leave the device.

The state of a parameter is a dict; its values are tensors, or dicts and lists of them. A tensor leaves if it is plain
memory of its parameter's device that nothing else is made of: scalars, tensors below the session's `min_bytes`, views
and tensors of unknown classes stay, and so does whatever shares memory with the parameter, its gradient or another
tensor of the state, or is in the states of several parameters. The local part of a DTensor leaves as a plain tensor
does.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from vdnn.runtime.torch_internals.gradient_reads import native_gradient
from vdnn.runtime.torch_internals.local_shards import with_local_part
from vdnn.runtime.torch_internals.memory_holders import Counts, value_is_held
from vdnn.runtime.torch_internals.tensor_kinds import PLAIN_CLASSES, has_plain_storage, plain_part
from vdnn.runtime.training_state.homes import device_of

_State = dict[Any, Any] | list[Any]


class Place(NamedTuple):
    """A tensor, and the container that holds it under `key`. Of a DTensor, `tensor` is the local part."""

    container: _State
    key: Any
    tensor: torch.Tensor
    whole: Any = None  # the DTensor of which `tensor` is the local part

    def put(self, tensor: torch.Tensor) -> None:
        self.container[self.key] = self.holding(tensor)

    def holding(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor`, or a DTensor around it if the container held one."""
        return tensor if self.whole is None else with_local_part(self.whole, tensor)


def places_in(state: object) -> Iterator[Place]:
    """Every tensor in the state of one parameter. The caller may replace each as it comes."""
    if isinstance(state, dict):
        pairs: list[tuple[Any, Any]] = list(state.items())
    elif isinstance(state, list):
        pairs = list(enumerate(state))
    else:
        return
    for key, value in pairs:
        if isinstance(value, torch.Tensor):
            local = None if type(value) in PLAIN_CLASSES else plain_part(value)
            yield Place(state, key, value) if local is None else Place(state, key, local, value)
        else:
            yield from places_in(value)


def leaving(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor], min_bytes: int) -> list[Place]:
    """The tensors in the state of `parameters` that may leave the device. A tensor that `optimizer` has in several
    places, such as a table of a quantization for all parameters, may not."""
    found = [place for one in parameters for place in _movable(one, optimizer.state.get(one), min_bytes)]
    if all(references <= _HELD_ONCE for references in _references(found)):
        return found
    everywhere = places_in({name: value for name, value in vars(optimizer).items() if name != "param_groups"})
    counts = Counter(id(place.tensor) for place in everywhere)
    return [place for place in found if counts[id(place.tensor)] == 1]


def _movable(parameter: torch.Tensor, state: object, min_bytes: int) -> list[Place]:
    local = plain_part(parameter)
    if local is None:
        return []
    found = [place for place in places_in(state) if is_whole(place.tensor, device_of(parameter))]
    tensors = [place.tensor for place in found] + [local]
    own = native_gradient(parameter)
    gradient = None if own is None else plain_part(own)
    tensors += [] if gradient is None else [gradient]
    holders = Counter(one.untyped_storage()._cdata for one in tensors)
    return [
        place
        for place in found
        if holders[place.tensor.untyped_storage()._cdata] == 1 and place.tensor.untyped_storage().nbytes() >= min_bytes
    ]


def _references(places: list[Place]) -> list[int]:
    return [sys.getrefcount(place.tensor) for place in places]


def states_are_held(optimizer: torch.optim.Optimizer) -> bool:
    """True if somebody else holds the dict of all states."""
    return _references_to(vars(optimizer), "state") > _REFERENCES


def state_is_held(states: Any, parameter: torch.Tensor, hosts: Container[int]) -> bool:
    """True if somebody else holds a part of the state of `parameter`. `hosts`: ids of host tensors, which are held
    once more by us."""
    if parameter not in states:
        return False
    if _references_to(states, parameter) > _REFERENCES:
        return True
    found = [(place.container, place.key) for place in places_in(states[parameter])]
    for container, key in found:
        ours = id(container[key]) in hosts
        is_view = ours and container[key]._is_view()  # of the tensor that was made of the pinned memory
        if value_is_held(container, key, Counts(ours, 0, 0, is_view)):
            return True
    return False


def _references_to(container: Any, key: Any) -> int:
    value = container[key]
    return sys.getrefcount(value)


_REFERENCES = _references_to({"alone": object()}, "alone")


def lines_of_other_classes(optimizer: torch.optim.Optimizer) -> list[str]:
    """For the report: tensors of the state that stay where they are, because their bytes are in tensors of their own,
    as those of quantized optimizers are."""
    places = [place for state in dict(vars(optimizer)["state"]).values() for place in places_in(state)]
    kinds = Counter(type(one.tensor).__name__ for one in places if type(one.tensor) not in PLAIN_CLASSES)
    return [f"  {count} tensors of it stay on the device: {name} is no plain tensor" for name, count in kinds.items()]


def is_whole(tensor: torch.Tensor, device: torch.device) -> bool:
    """True if `tensor` is plain memory of `device` and all of its storage."""
    if not tensor.dim() or tensor.device != device or not has_plain_storage(tensor) or tensor.requires_grad:
        return False
    nbytes = tensor.untyped_storage().nbytes()
    is_exact = nbytes == tensor.numel() * tensor.element_size() and not tensor.storage_offset()
    return nbytes > 0 and is_exact and is_dense(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """True if no two elements overlap and none lie apart, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def bytes_of_first_state(parameter: torch.Tensor, min_bytes: int) -> int:
    """A guess at the bytes that may leave of a state that does not exist yet: usually it is one or two tensors of the
    parameter's size."""
    local = plain_part(parameter)
    return 0 if local is None or local.nbytes < min_bytes else 2 * local.nbytes


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


_HELD_ONCE = _references(list(places_in({"alone": torch.zeros(1)})))[0]
