"""Keeps the random states of Python, numpy and torch, so that a rehearsal draws the same numbers each time and leaves
those of the program as they were."""

from __future__ import annotations

import contextlib
import random
import sys
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
def same_random_numbers() -> Iterator[None]:
    """A context in which each run draws the same random numbers, so that random branches repeat."""
    with random_state_kept():
        random.seed(0)
        torch.manual_seed(0)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(0)
        yield
