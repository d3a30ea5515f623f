"""Finds the tensors in an optimizer's state, and which of them may leave the device.

The state of a parameter is a dict; its values are tensors, or dicts, lists, deques and tuples of them. A tensor leaves
if it is plain memory of its parameter's device that nobody else holds: scalars, tensors below the session's
`min_bytes`, views and tensors of unknown classes stay, and so does what is in the states of several parameters, or
shares memory with a parameter, a gradient, a state_dict or whatever else a program holds. The local part of a DTensor
leaves as a plain tensor does.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from vdnn.bytesize import format_bytes
from vdnn.runtime.torch_internals.local_shards import with_local_part
from vdnn.runtime.torch_internals.memory_holders import HolderCounts, value_is_held, wrapper_is_held
from vdnn.runtime.torch_internals.tensor_kinds import PLAIN_CLASSES, has_plain_storage, plain_part
from vdnn.runtime.training_state.homes import device_of
from vdnn.runtime.training_state.host_tensor import has_base

_SHOWN = 3


class _InTuple:
    """The elements of the tuple that `holder` has under `key`. Where one is put, a new tuple takes its place."""

    def __init__(self, holder: _State, key: Any) -> None:
        self._holder, self._key = holder, key

    def __getitem__(self, index: Any) -> Any:
        return self._holder[self._key][index]

    def __setitem__(self, index: Any, value: Any) -> None:
        before = self._holder[self._key]
        elements = [*before[:index], value, *before[index + 1 :]]
        make = getattr(type(before), "_make", type(before))  # of a named tuple
        self._holder[self._key] = make(elements)

    @property
    def is_held(self) -> bool:
        """True if somebody else holds the tuple."""
        return _references_to(self._holder, self._key) > _REFERENCES


_State = dict[Any, Any] | list[Any] | deque[Any] | _InTuple


class TensorPlace(NamedTuple):
    """A tensor, and the container that holds it under `key`. For a DTensor, `tensor` is the local part."""

    container: _State
    key: Any
    tensor: torch.Tensor
    whole: Any = None  # the DTensor of which `tensor` is the local part

    def put(self, tensor: torch.Tensor) -> None:
        self.container[self.key] = self.holding(tensor)

    def holding(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor`, or a DTensor around it if the container held one."""
        return tensor if self.whole is None else with_local_part(self.whole, tensor)


def places_in(state: object) -> Iterator[TensorPlace]:
    """Every tensor in the state of one parameter. The caller may replace each as it comes."""
    if isinstance(state, dict):
        yield from _places(state, list(state.items()))
    elif isinstance(state, (list, deque)):
        yield from _places(state, list(enumerate(state)))


def _places(state: _State, pairs: list[tuple[Any, Any]]) -> Iterator[TensorPlace]:
    for key, value in pairs:
        if isinstance(value, torch.Tensor):
            local = None if type(value) in PLAIN_CLASSES else plain_part(value)
            yield TensorPlace(state, key, value) if local is None else TensorPlace(state, key, local, value)
        elif isinstance(value, tuple):
            yield from _places(_InTuple(state, key), list(enumerate(value)))
        else:
            yield from places_in(value)


def movable(state: object, parameter: torch.Tensor, min_bytes: int) -> list[TensorPlace]:
    """The tensors in the state of `parameter` that may leave the device if nobody else holds them."""
    if plain_part(parameter) is None:
        return []
    device = device_of(parameter)
    found = [place for place in places_in(state) if is_whole(place.tensor, device)]
    return [place for place in found if place.tensor.untyped_storage().nbytes() >= min_bytes]


def is_held(place: TensorPlace) -> bool:
    """True if anything but the state and this `place` holds the tensor or its memory."""
    if isinstance(place.container, _InTuple) and place.container.is_held:
        return True
    if place.whole is None:
        return value_is_held(lambda: place.container[place.key], _A_PLACE)
    return wrapper_is_held(lambda: place.container[place.key], _A_PLACE) or value_is_held(
        lambda: place.container[place.key]._local_tensor, _A_PLACE
    )


_A_PLACE = HolderCounts(1, 0)


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
        known = HolderCounts(ours, 0, 0, ours and has_base(container[key]))
        if value_is_held(functools.partial(_value_of, container, key), known):
            return True
    return False


def _value_of(container: Any, key: Any) -> torch.Tensor:
    return container[key]  # type: ignore[no-any-return]


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


def lines_of_held(optimizer: torch.optim.Optimizer, held: Mapping[int, Mapping[str, int]]) -> list[str]:
    """For the report: tensors of the state that stay because the program holds them as well. `held`: their bytes, by
    parameter's id and name."""
    groups: Any = optimizer.param_groups
    known = [(id(one), name) for group in groups for one, name in zip(group["params"], _names(group), strict=True)]
    labels = [f"parameter {index}{name}" for index, (_, name) in enumerate(known)]
    names = [
        f"{key} of {label}"
        for (identity, _), label in zip(known, labels, strict=True)
        for key in held.get(identity, ())
    ]
    if not names:
        return []
    nbytes = sum(sum(held.get(identity, {}).values()) for identity, _ in known)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shown = ", ".join(names[:_SHOWN])
    return [
        f"  {format_bytes(nbytes)} of it stay on the device, because the program holds the same memory: {shown}{more}"
    ]


def _names(group: dict[str, Any]) -> list[str]:
    """The names of the parameters of a group for a text, if they have any."""
    names = group.get("param_names")
    return [""] * len(group["params"]) if names is None else [f" ({name})" for name in names]


def is_whole(tensor: torch.Tensor, device: torch.device) -> bool:
    """True if `tensor` is plain memory of `device` and all of its storage."""
    if not tensor.dim() or tensor.device != device or not has_plain_storage(tensor) or tensor.requires_grad:
        return False
    if has_lazy_bits(tensor):
        return False
    nbytes = tensor.untyped_storage().nbytes()
    is_exact = nbytes == tensor.numel() * tensor.element_size() and not tensor.storage_offset()
    return nbytes > 0 and is_exact and is_dense(tensor)


def has_lazy_bits(tensor: torch.Tensor) -> bool:
    """True if torch conjugates or negates the values as it reads them: their bytes are not the values."""
    return tensor.is_conj() or tensor.is_neg()


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


def temporary_bytes(stepped: Iterable[torch.Tensor]) -> int:
    """The bytes that the step of these parameters may take beyond them, their gradients and their state."""
    return 2 * sum(parameter.nbytes for parameter in stepped)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
