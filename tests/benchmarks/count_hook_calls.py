"""Counts the functions that are called for each save and its use, for each kind of hooks, and prints them as JSON.

A program of its own, for test_hook_cost.py.
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

import torch

from benchmarks.core.hook_cost import ELEMENTS, NO_OP, PLAIN, SAVES, NoOp, chain, vdnn_ways


def calls_a_save(hooks: AbstractContextManager[object]) -> float:
    """Counts the Python and native functions called for each save and its use."""
    calls = 0

    def count(frame: FrameType, event: str, called: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    x = torch.rand(ELEMENTS, requires_grad=True)
    gc.collect()
    gc.disable()  # a collection would call the finalizers of earlier tests
    with hooks:
        sys.setprofile(count)
        try:
            chain(x)
        finally:
            sys.setprofile(None)
            gc.enable()
    return calls / SAVES


def main() -> None:
    no_op, sessions = NoOp(), vdnn_ways()
    ways: dict[str, AbstractContextManager[object]] = {
        PLAIN: nullcontext(),
        NO_OP: torch.autograd.graph.saved_tensors_hooks(no_op.pack, no_op.unpack),
        **sessions,
    }
    counted = {name: calls_a_save(hooks) for name, hooks in ways.items()}
    for session in sessions.values():
        session.close()
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
