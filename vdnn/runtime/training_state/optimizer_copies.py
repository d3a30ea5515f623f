"""Copies of optimizers without state, for other parameters: to try a step, or to measure what it takes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

_LARGEST_TABLE_BYTES = 1 << 16
_DEEP = 4  # objects in objects are looked into so far


def copy_without_state(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """A copy of `optimizer` with these groups."""
    made = object.__new__(type(optimizer))
    made.__dict__.update(attributes_of(optimizer))
    made.__setstate__({"defaults": copy.deepcopy(optimizer.defaults), "state": _empty_state(), "param_groups": groups})
    return made


def own_step_of(optimizer: torch.optim.Optimizer) -> Any:
    """The step of the class, without torch's hooks."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def _empty_state() -> Any:
    return torch.optim.SGD([torch.zeros(1)], lr=0.0).state


@functools.cache
def _attributes_of_torch() -> frozenset[str]:
    """Returns what torch's base class makes. Not read at import: torch's first optimizer loads its compiler."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.0)))


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of the attributes that the class of `optimizer` gives it, without attributes that have large tensors."""
    known = _attributes_of_torch()
    own = {name: value for name, value in vars(optimizer).items() if name not in known and not name.startswith("__")}
    return {name: value if callable(value) else copy.deepcopy(value) for name, value in own.items() if _is_small(value)}


def _is_small(value: object, deep: int = _DEEP) -> bool:
    """True for values with no tensors but small ones, such as tables of a quantization. An object that holds a model or
    another optimizer may read all parameters. An own step that needs more fails on the stand-ins, which says so."""
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.nbytes <= _LARGEST_TABLE_BYTES
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        return False
    if isinstance(value, dict):
        return all(_is_small(one, deep) for one in value.values())
    if isinstance(value, (list, tuple, set)):
        return all(_is_small(one, deep) for one in value)
    return deep == 0 or callable(value) or _is_small(getattr(value, "__dict__", ()), deep - 1)
