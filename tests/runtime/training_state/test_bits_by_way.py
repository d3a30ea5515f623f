"""Every way in which a training's state leaves the device has the bits of plain PyTorch, with what left poisoned.

One contract over all ways: every optimizer in every loop, tied weights, models that use weights in unusual places, and
every order of copies. Compared are all losses, norms, parameters, tensors of the state and options of groups.
"""

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
from tests.runtime.training_state.ways import options_of, ways_of_bits
from vdnn import _C
from vdnn.runtime.training_state import cpu_steps
from vdnn.runtime.training_state.optimizer_state import state_of


@pytest.fixture
def same_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU torch's fused form may run the step; its bits are those of the fused form alone."""
    if "fused" not in request.node.callspec.params.get("optimizer", "adamw"):
        monkeypatch.setattr(cpu_steps, "_FUSED_ON_THE_CPU", ())


pytestmark = pytest.mark.usefixtures("same_form")


@contextlib.contextmanager
def in_plain_pytorch(way: str, model: nn.Module) -> Iterator[None]:
    if "frozen" in way:
        model.get_parameter("between.weight").requires_grad_(False)
    yield


def trained(way: str, optimizer: str, loop: str, manage: Manage | None, *, tied: bool = False) -> list[Any]:
    """Runs a training, in plain PyTorch without `manage`, and returns what it comes to."""

    @contextlib.contextmanager
    def inside(managed: Any, model: nn.Module) -> Iterator[None]:
        with in_plain_pytorch(way, model):
            if manage is None:
                yield
                return
            with manage(managed, **options_of(way, model)):
                yield
            assert_it_went_this_way(way, optimizer, loop, managed)

    return train(OPTIMIZERS[optimizer], LOOPS[loop], inside, with_model=True, tied=tied)


def assert_it_went_this_way(way: str, optimizer: str, loop: str, managed: torch.optim.Optimizer) -> None:
    state = state_of(managed)
    assert state.gradients.host_bytes == 0
    waits = "deferred" in way and optimizer != "third-party" and loop != "by_closures"  # these step at once
    many = 100 if waits and optimizer != "muon" and "frozen" not in way else int(waits)
    assert state.moved.deferred >= many
    assert (state.moved.deferred > 0) == waits
    if "deferred" in way:
        assert (state.gradients.copies.to_host_bytes > 0) == ("gradients" in way)


@pytest.mark.drawn(of=15)
@ways_of_bits
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_has_the_bits_of_plain_pytorch(
    optimizer: str, loop: str, way: str, manage: Manage, poisoned: list[int]
) -> None:
    found = trained(way, optimizer, loop, manage)
    assert len(poisoned) >= (100 if way == "all" else 0)
    assert same(trained(way, optimizer, loop, None), found)


TIED = [*((name, "plain") for name in OPTIMIZERS), *(("adamw", loop) for loop in LOOPS if loop != "plain")]


@pytest.mark.drawn(of=8)
@ways_of_bits
@pytest.mark.parametrize(("optimizer", "loop"), TIED)
def test_tied_weights_have_the_bits_of_plain_pytorch(
    optimizer: str, loop: str, way: str, manage: Manage, poisoned: list[int]
) -> None:
    found = trained(way, optimizer, loop, manage, tied=True)
    assert same(trained(way, optimizer, loop, None, tied=True), found)
    assert poisoned or "all" not in way


@quick_and_full("seeds", 6, 20)
@pytest.mark.drawn(of=3)
@ways_of_bits
@pytest.mark.parametrize("optimizer", ["adamw-foreach", "adamw-fused", "third-party"])
def test_no_order_of_copies_changes_a_bit(optimizer: str, way: str, seeds: int) -> None:
    expected = trained(way, optimizer, "accumulation", None, tied=True)
    for seed in range(seeds):
        checker = _C.OrderingChecker(_C.SimDevice(schedule=_C.Schedule.RANDOM, seed=seed))

        @contextlib.contextmanager
        def manage(managed: Any, checker: _C.Device = checker, **options: Any) -> Iterator[Any]:
            with contextlib.closing(open_session(checker, managed, **options)) as session, session:
                yield session

        assert same(expected, trained(way, optimizer, "accumulation", manage, tied=True)), f"seed {seed}"
        checker.close()
        assert checker.take_violations() == []


@pytest.mark.drawn(of=12)
@ways_of_bits
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("model", MODELS)
def test_a_program_has_the_bits_of_plain_pytorch(
    model: str, program: str, way: str, manage: Manage, poisoned: list[int]
) -> None:
    """LoRA; weights that are used twice, outside of their module, in checkpoints and in recurrent layers; evaluation,
    saving, copies and loads in between."""

    def run(*, is_managed: bool) -> list[Any]:
        module = made(model)
        if "frozen" not in way:
            module.requires_grad_()

        def inside(managed: Any) -> contextlib.AbstractContextManager[Any]:
            return manage(managed, **options_of(way, module)) if is_managed else contextlib.nullcontext()

        return run_program(module, program, inside, steps=10, takes_optimizer=True)

    expected, found = run(is_managed=False), run(is_managed=True)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))
    assert poisoned or "all" not in way


class Autocast(nn.Module):
    """Calls an optimizer's step inside and outside of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outcome: torch.Tensor = self.second(self.first(x).relu())
        return outcome


@pytest.mark.parametrize("steps_inside", [False, True])
def test_the_step_runs_under_the_autocast_of_its_call(steps_inside: bool, manage: Manage) -> None:
    """Muon multiplies matrices, which autocast casts."""

    def run(inside: Any) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model = Autocast()
        optimizer = torch.optim.Muon([model.first.weight, model.second.weight], lr=0.1)
        with inside(optimizer):
            for _ in range(5):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(torch.randn(4, 8)).float().square().mean()
                    loss.backward()
                    if steps_inside:
                        optimizer.step()
                if not steps_inside:
                    optimizer.step()
                optimizer.zero_grad()
            return [one.detach().clone() for one in model.parameters()]

    plain = run(lambda _: contextlib.nullcontext())
    assert all(map(torch.equal, plain, run(partial(manage, optimizer_step="deferred"))))


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
