"""Trainings whose parameters, gradients and state are on the host have the bits of plain PyTorch, with what left the
device poisoned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.drawn import quick_and_full
from tests.runtime.training_state.conftest import Manage, open_session
from tests.runtime.training_state.loops import LOOPS, OPTIMIZERS, same, train
from tests.runtime.training_state.parameters.frozen_loops import LOOPS as PROGRAMS
from tests.runtime.training_state.parameters.frozen_loops import MODELS, made
from tests.runtime.training_state.parameters.frozen_loops import train as run_program
from vdnn import _C

ADAMW = OPTIMIZERS["adamw"]


@pytest.mark.drawn(of=12)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_has_the_bits_of_plain_pytorch(
    optimizer: str, loop: str, manage: Manage, poisoned: list[int]
) -> None:
    make, train_in = OPTIMIZERS[optimizer], LOOPS[loop]
    found = train(make, train_in, partial(manage, parameters="all"), with_model=True)
    assert len(poisoned) >= 100
    assert same(train(make, train_in), found)


@pytest.mark.parametrize("loop", LOOPS)
def test_tied_weights_have_the_bits_of_plain_pytorch(loop: str, manage: Manage, poisoned: list[int]) -> None:
    expected = train(ADAMW, LOOPS[loop], tied=True)
    assert same(expected, train(ADAMW, LOOPS[loop], partial(manage, parameters="all"), with_model=True, tied=True))
    assert poisoned


@pytest.mark.parametrize("on", ["cpu", "device"])
@pytest.mark.parametrize("optimizer", ["momentum-fused", "adamw-fused"])
def test_a_step_on_the_cpu_steps_the_host_copies(optimizer: str, on: str, manage: Manage, poisoned: list[int]) -> None:
    """Both run in torch's fused form for the CPU here, so that the bits are those of plain PyTorch."""
    inside = partial(manage, parameters="all", optimizer_on=on)
    make = OPTIMIZERS[optimizer]
    assert same(train(make, LOOPS["accumulation"]), train(make, LOOPS["accumulation"], inside, with_model=True))
    assert poisoned


@pytest.mark.slow
@quick_and_full("seeds", 6, 20)
@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("optimizer", ["adamw-foreach", "third-party"])
def test_no_order_of_copies_changes_a_bit(optimizer: str, seeds: int) -> None:
    make = OPTIMIZERS[optimizer]
    expected = train(make, LOOPS["accumulation"], tied=True)
    for seed in range(seeds):
        checker = _C.OrderingChecker(_C.SimDevice(schedule=_C.Schedule.RANDOM, seed=seed))

        @contextlib.contextmanager
        def inside(managed: Any, model: nn.Module, checker: _C.Device = checker) -> Iterator[None]:
            opened = open_session(checker, managed, model=model, parameters="all")
            with contextlib.closing(opened) as session, session:
                yield

        assert same(expected, train(make, LOOPS["accumulation"], inside, with_model=True, tied=True)), f"seed {seed}"
        checker.close()
        assert checker.take_violations() == []


@pytest.mark.drawn(of=3)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("model", MODELS)
def test_a_program_has_the_bits_of_plain_pytorch(model: str, program: str, manage: Manage, poisoned: list[int]) -> None:
    """Weights that are used twice, outside of their module, in checkpoints and in recurrent layers; evaluation, saving,
    copies and loads in between. All parameters are trained."""

    def run(*, is_managed: bool) -> list[Any]:
        module = made(model).requires_grad_()

        def inside(managed: Any) -> contextlib.AbstractContextManager[Any]:
            return manage(managed, model=module, parameters="all") if is_managed else contextlib.nullcontext()

        return run_program(module, program, inside, steps=10, takes_optimizer=True)

    expected, found = run(is_managed=False), run(is_managed=True)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))
    assert poisoned


def _one_step_of_sign(parameter: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor) -> None:
    mean.lerp_(gradient.float(), 0.1)
    parameter.add_(mean.sign(), alpha=-0.01)


class CompilesItsStep(torch.optim.Optimizer):
    """Compiles the step of one parameter, as the optimizers of torchao do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        compiled = torch.compile(_one_step_of_sign, fullgraph=True, dynamic=False, backend="eager")
        for parameter in (one for group in self.param_groups for one in group["params"]):
            state = self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter)
            compiled(parameter.detach(), parameter.grad, state["mean"])


@pytest.mark.slow
def test_a_step_that_the_optimizer_compiles_has_the_bits_of_plain_pytorch(manage: Manage) -> None:
    from torch._dynamo import config

    def inside(managed: Any, model: nn.Module) -> Any:
        return manage(managed, model=model, parameters="all")

    with config.patch(recompile_limit=1000):  # one for each shape; pytest's monkeypatch deletes the setting in the end
        expected = train(CompilesItsStep, LOOPS["plain"])
        assert same(expected, train(CompilesItsStep, LOOPS["plain"], inside, with_model=True))
