"""What an optimizer is set to, put back as it was: a user's step may call a scheduler, which holds the original."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def settings_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Also through an exception. Of each group all but its parameters. Schedulers count the steps of the original, and
    warn where copies step: not here."""
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
    """A learning rate may be a tensor, which is written into."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
