"""Knows where parameters compute whose data are on the host for a while. Their optimizer's state belongs there, too."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch


class Managed(Protocol):
    """A parameter that a session manages."""

    @property
    def device(self) -> torch.device:
        """The device on which it computes."""


_managed: weakref.WeakValueDictionary[int, Managed] = weakref.WeakValueDictionary()  # by id of the parameter


def managed(parameter: torch.Tensor) -> Managed | None:
    return _managed.get(id(parameter))


def is_managed(parameter: torch.Tensor) -> bool:
    return id(parameter) in _managed


def device_of(parameter: torch.Tensor) -> torch.device:
    """The device on which `parameter` computes, wherever its data are now."""
    known = _managed.get(id(parameter))
    return parameter.device if known is None else known.device


def manage(parameter: torch.Tensor, by: Managed) -> None:
    """`by` holds `parameter`, and says its device from now on."""
    _managed[id(parameter)] = by


def manage_no_longer(parameter: torch.Tensor) -> None:
    _managed.pop(id(parameter), None)
