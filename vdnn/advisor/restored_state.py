"""Restores the settings of an optimizer, which a user's step may change: a scheduler changes the original optimizer."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def settings_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore all settings of each group on exit, also after an exception. Ignores the warning of schedulers, which
    count the steps of the original while only copies step."""
    before = [{name: _held(one) for name, one in group.items() if name != "params"} for group in optimizer.param_groups]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step\\(\\)` before", UserWarning)
            yield
    finally:
        for group, settings in zip(optimizer.param_groups, before, strict=False):
            for name, value in settings.items():
                if isinstance(value, torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value


def _held(value: object) -> object:
    """A copy of a setting. A learning rate may be a tensor, which is written in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
