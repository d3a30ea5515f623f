"""Lets transformers leave out a mask in a rehearsal where it leaves it out on a GPU.

It makes no mask if positions count up in each row and no token is padded. It reads that from their values, but not from
tensors without data, which it takes for those of a trace: then each attention gets a mask of tokens x tokens, and no
fused kernel without one. A rehearsal knows positions and masks of ones (known_values.py). For a mask whose values it
does not know, it answers that tokens are padded, which needs more memory, and reports a stand-in.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_MODULE, _QUESTION = "transformers.masking_utils", "is_tracing"


class MaskQuestions:
    """The question of transformers whether it is being traced, as far as masks depend on the answer."""

    def __init__(self) -> None:
        self._asked: tuple[ModuleType, Callable[..., Any]] | None = None

    def imported(self, module: ModuleType) -> None:
        """Called with a module behind its import. Answers for tensors without data from now on."""
        asks = getattr(module, _QUESTION, None)
        if module.__name__ != _MODULE or asks is None or self._asked is not None:
            return
        self._asked = module, asks
        setattr(module, _QUESTION, lambda tensor=None: asks())

    def remove(self) -> None:
        if self._asked is not None:
            module, asks = self._asked
            setattr(module, _QUESTION, asks)
            self._asked = None


@contextlib.contextmanager
def masks_as_on_a_gpu() -> Iterator[MaskQuestions]:
    """A context in which values are read for masks. Not for several threads."""
    questions = MaskQuestions()
    loaded = sys.modules.get(_MODULE)
    if loaded is not None:
        questions.imported(loaded)
    try:
        yield questions
    finally:
        questions.remove()
