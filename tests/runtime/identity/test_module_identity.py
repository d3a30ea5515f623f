"""Gradients are bit for bit those of plain PyTorch, over torch's own database of modules.

Compares the gradients of parameters and inputs, in training and in evaluation, and the buffers afterwards.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.runtime.identity.databases import modules
from tests.runtime.identity.outcome import Outcome
from tests.runtime.identity.rig import NOTHING_TO_MOVE, identity_rigs
from tests.runtime.identity.runs import SEED, Mode, fresh_copies, leaves_of, run_step
from vdnn.runtime.storage.counters import Kept

CHUNKS = 8
MAY_STAY = NOTHING_TO_MOVE | {Kept.PARAMETER}
# Saves a detached parameter of an inner module that is never called. It is not recognized, and copied for nothing.
HELD = ("nn_LinearCrossEntropyLoss",)
Record = Callable[[str, object], None]
pytestmark = pytest.mark.filterwarnings("ignore")  # the database's own warnings


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_module_has_the_gradients_of_plain_torch(chunk: int, record_property: Record) -> None:
    with identity_rigs(chunk, record_property) as rigs:
        for info, rig in zip(modules()[chunk::CHUNKS], itertools.cycle(rigs)):
            name, run = next(_cases_of(info))
            rig.compare(name, functools.partial(run, Mode.TWICE), may_stay=MAY_STAY)


@pytest.mark.full
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_module_input_in_every_mode_has_the_gradients_of_plain_torch(chunk: int, record_property: Record) -> None:
    with identity_rigs(chunk, record_property) as rigs:
        for info in modules()[chunk::CHUNKS]:
            for index, (name, run) in enumerate(_cases_of(info)):
                for turn, mode in enumerate(Mode):
                    if mode is not Mode.DOUBLE or info.supports_gradgrad:
                        rig = rigs[(index + turn) % len(rigs)]
                        may_stay = None if mode is Mode.DOUBLE or info.formatted_name in HELD else MAY_STAY
                        rig.compare(f"{name}, {mode.value}", functools.partial(run, mode), may_stay=may_stay)


def _cases_of(info: Any) -> Iterator[tuple[str, Any]]:
    for training in (True, False) if info.train_and_eval_differ else (True,):
        torch.manual_seed(0)
        inputs = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=training)
        for index, given in enumerate(inputs):
            name = f"{info.formatted_name} input {index} {'training' if training else 'evaluation'}"
            yield name, functools.partial(_run, info, given, training)


def _run(info: Any, given: Any, training: bool, mode: Mode) -> Outcome:
    torch.manual_seed(SEED)
    module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).train(training)
    leaves, arguments = leaves_of((given.forward_input.args, given.forward_input.kwargs))

    def forward() -> Any:
        args, kwargs = fresh_copies(arguments)
        return module(*args, **kwargs)

    if info.is_lazy:
        with torch.no_grad():
            forward()
    outcome = run_step(forward, [*leaves, *module.parameters()], mode)
    for name, buffer in module.named_buffers():
        outcome.note(f"buffer {name}", buffer)
    return outcome
