"""Restores what a user's step changes: the random states of Python, numpy and torch, and the settings of the optimizer.

A step may draw random numbers, and may call a scheduler, which changes the original optimizer.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def random_state_kept(*generators: Any) -> Iterator[None]:
    """Restore all random states on exit, also after an exception. `generators` are more torch generators, or None."""
    of_python, of_torch = random.getstate(), torch.get_rng_state()
    on_gpus = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    of_gpus = torch.cuda.get_rng_state_all() if on_gpus else []
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    others = [(one, one.get_state()) for one in generators if isinstance(one, torch.Generator)]
    try:
        yield
    finally:
        random.setstate(of_python)
        torch.set_rng_state(of_torch)
        if of_gpus:
            torch.cuda.set_rng_state_all(of_gpus)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        for one, state in others:
            one.set_state(state)


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
