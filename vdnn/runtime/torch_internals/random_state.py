"""Keeps and compares the random states of Python, numpy and torch: what vdnn tries or rehearses draws the same numbers
each time, and leaves those of the program as they were."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


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
        seed_all(0)
        yield


def seed_all(seed: int) -> None:
    """torch.manual_seed would also replace the seed of a GPU that is not in use yet, which nothing sets back."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def random_states() -> tuple[object, ...]:
    """Those of the host, to compare: where nothing was drawn meanwhile they are equal."""
    numpy = sys.modules.get("numpy")
    with _disable_current_modes():
        of_torch = torch.get_rng_state().numpy().tobytes()
    if numpy is None:
        return random.getstate(), of_torch
    _, words, *position = numpy.random.get_state()
    return random.getstate(), of_torch, words.tobytes(), position
