"""Tells whether somebody else holds a parameter's memory, its gradient, or its optimizer's state.

Whoever does would see what happens to them later than in plain PyTorch, or change them unseen. Counts of references
are compared with those of things that nobody else holds, measured at import by the same functions.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from typing import Any

import torch

from vdnn.runtime.storage.source import natively_held
from vdnn.runtime.torch_internals.gradient_reads import native_gradient, set_native_gradient
from vdnn.runtime.training_state.state_tensors import places_in


def _gradient_counts(parameter: torch.Tensor) -> tuple[int, int]:
    """References to the Python object of a gradient, and to its storage."""
    gradient = native_gradient(parameter)
    if gradient is None:
        return 0, 0
    storage = 0 if gradient.layout is not torch.strided else natively_held(gradient.untyped_storage()._cdata)
    return sys.getrefcount(gradient), storage


def _memory_count(tensor: torch.Tensor) -> int:
    return natively_held(tensor.untyped_storage()._cdata)


def _references(container: Any, key: Any) -> int:
    value = container[key]
    return sys.getrefcount(value)


def _made() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(1))
    set_native_gradient(parameter, torch.zeros(1))
    return parameter


_GRADIENT, _GRADIENT_MEMORY = _gradient_counts(_made())
_MEMORY = _memory_count(_made())
_REFERENCES = _references({"alone": object()}, "alone")


def gradient_is_held(parameter: torch.Tensor) -> bool:
    references, storage_references = _gradient_counts(parameter)
    return references > _GRADIENT or storage_references > _GRADIENT_MEMORY


def memory_is_held(tensor: torch.Tensor) -> bool:
    """True if another tensor has the memory, or another process may have it."""
    is_shared = tensor.device.type == "cpu" and tensor.untyped_storage().is_shared()
    return is_shared or _memory_count(tensor) > _MEMORY


def states_are_held(optimizer: torch.optim.Optimizer) -> bool:
    """True if somebody else holds the dict of all states."""
    return _references(vars(optimizer), "state") > _REFERENCES


def state_is_held(states: Any, parameter: torch.Tensor, hosts: Container[int]) -> bool:
    """True if somebody else holds a part of the state of `parameter`. `hosts`: ids of host tensors, which are held
    once more by us."""
    if parameter not in states:
        return False
    if _references(states, parameter) > _REFERENCES:
        return True
    found = [(place.container, place.key) for place in places_in(states[parameter])]
    for container, key in found:
        ours = id(container[key]) in hosts
        is_view = ours and container[key]._is_view()  # of the tensor that was made of the pinned memory
        if _references(container, key) > _REFERENCES + ours or _memory_count(container[key]) > _MEMORY + is_view:
            return True
    return False
