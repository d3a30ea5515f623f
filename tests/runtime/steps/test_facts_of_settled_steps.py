"""Facts that recipes need are noted in settled steps where a recipe of the plan needs them, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import nn

from tests.runtime.rigs.settled_steps import OFFLOADS_ALL, settled_session, settling_of
from tests.runtime.steps.test_settled_recomputes import settled_program
from tests.runtime.steps.test_settled_steps import python_calls
from vdnn.runtime.session.session import Session

_DENORMAL = 3e-39


class Mix(nn.Module):
    """Its operation saves nothing and rounds twice, so only its boundaries tell under which settings that ran."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.lerp(a, b, 0.5)


class Sum(nn.Module):
    """Its operation saves nothing and rounds once: no setting changes it but that of denormals."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


class Program(nn.Module):
    """A mix that saves nothing, then a norm and a layer with a bias, all followed by one more operation that saves what
    they made. `bystanders` save nothing that a recipe could make."""

    def __init__(self, mix: nn.Module | None = None, bystanders: int = 6) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((4, 4), _DENORMAL))
        self.b = nn.Parameter(torch.full((4, 4), _DENORMAL))
        self.mix, self.norm, self.down = mix or Mix(), nn.LayerNorm(4), nn.Linear(4, 4)
        self.bystanders = nn.ModuleList(nn.Identity() for _ in range(bystanders))
        self.flushes_in_mix = False  # denormals become zero around the call of the mix

    def forward(self) -> torch.Tensor:
        scale = self.a.exp()  # the first save, which Python handles in every step
        a, b = self.a.neg().neg(), self.b.neg().neg()
        torch.set_flush_denormal(self.flushes_in_mix)
        x = self.mix(a, b)
        torch.set_flush_denormal(False)
        x = x.relu()
        y = self.norm(x.exp() * scale).tanh()
        z = self.down(y)
        for one in self.bystanders:
            z = one(z)
        return x.sign().detach().sum() + x.exp().sum() + z.sin().exp().sum()

    def step(self) -> list[torch.Tensor]:
        self.zero_grad()
        self().backward()
        found = [parameter.grad for parameter in self.parameters()]
        assert None not in found
        return [one for one in found if one is not None]


def noted_in(session: Session) -> set[int]:
    """The ids of the modules around which settled steps note facts."""
    recipes = session._engine.packer.saves.recipes
    assert recipes is not None
    return set(recipes._running.needs())


def test_a_settled_step_notes_facts_around_the_modules_of_its_recipes_alone() -> None:
    torch.manual_seed(0)
    program = Program()
    plain = program.step()
    with settled_program(program.step) as session:
        before = session.counters.recomputes
        assert all(map(torch.equal, program.step(), plain))
        session.step()
        assert session.counters.recomputes > before
        assert settling_of(session).is_expected
        noted = noted_in(session)
        assert {id(program.mix), id(program.down)} <= noted
        assert not noted & {id(one) for one in program.bystanders}


def test_no_fact_is_noted_around_a_module_that_rounds_once() -> None:
    torch.manual_seed(0)
    program, setter = Program(Sum()), torch.set_flush_denormal
    with settled_program(program.step) as session:
        before = session.counters.recomputes
        program.step()
        session.step()
        assert session.counters.recomputes > before
        assert id(program.mix) not in noted_in(session)
        assert torch.set_flush_denormal is not setter, "its calls are seen"
    assert torch.set_flush_denormal is setter


def test_a_settled_step_without_recomputes_notes_no_facts() -> None:
    with settled_session(OFFLOADS_ALL) as (_, network), python_calls() as called:
        network.step()
    assert "observe_parameters" not in called


@contextmanager
def flushing_denormals(program: Program) -> Iterator[None]:
    program.flushes_in_mix = True
    try:
        yield
    finally:
        program.flushes_in_mix = False


@contextmanager
def another_eps(program: Program) -> Iterator[None]:
    program.norm.eps = 0.5
    try:
        yield
    finally:
        program.norm.eps = 1e-5


@contextmanager
def written_bias(program: Program) -> Iterator[None]:
    """The bias of the layer, which it does not save, is written to before what it made is saved."""

    def write(*_: object) -> None:
        with torch.no_grad():
            program.down.bias.add_(1)

    handle = program.bystanders[0].register_forward_pre_hook(write)
    try:
        yield
    finally:
        handle.remove()
        with torch.no_grad():
            program.down.bias.sub_(1)


CHANGES: dict[str, Callable[[Program], AbstractContextManager[None]]] = {
    "settings of the mix": flushing_denormals,
    "eps of the norm": another_eps,
    "bias of the layer": written_bias,
}


@pytest.mark.parametrize("mix", [Mix, Sum])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_fact_that_changes_in_a_settled_step_is_seen(
    change: Callable[[Program], AbstractContextManager[None]], mix: type[nn.Module]
) -> None:
    torch.manual_seed(0)
    program = Program(mix())
    with change(program):
        plain = program.step()
    with settled_program(program.step) as session:
        with change(program):
            assert all(map(torch.equal, program.step(), plain))
        session.step()


def test_the_settings_of_a_module_that_is_new_in_a_settled_step_are_not_known() -> None:
    """Nothing is noted around it, and the settings at other modules do not count for it."""
    torch.manual_seed(0)
    program = Program()
    with flushing_denormals(program):
        plain = program.step()
    with settled_program(program.step) as session:
        program.mix = Mix()
        with flushing_denormals(program):
            assert all(map(torch.equal, program.step(), plain))
        session.step()
        assert not settling_of(session).is_expected


def test_steps_that_make_their_modules_anew_settle_once_facts_are_noted_everywhere() -> None:
    torch.manual_seed(0)
    program, held = Program(), list[nn.Module]()

    def step() -> None:
        program.mix = Mix()
        held.append(program.mix)  # so that no later one has its address
        program.step()

    with settled_program(program.step) as session:
        for _ in range(12):
            step()
            session.step()
        before = session.counters.recomputes
        step()
        session.step()
        assert settling_of(session).is_expected
        assert session.counters.recomputes > before


class Begins(nn.Module):
    """Its first save is inside the forward of a norm, which no recipe repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.next = nn.LayerNorm(4), nn.Linear(4, 4)
        self.modes: list[int] = []
        self.x = torch.randn(2, 4)

    def forward(self) -> torch.Tensor:
        y = self.norm(self.x)
        self.modes.append(torch._C._len_torch_function_stack())
        return self.next(self.x).sin().exp().sum() + y.sum()


def test_no_function_mode_is_left_where_a_settled_step_begins_inside_a_norm() -> None:
    torch.manual_seed(0)
    model = Begins()
    with settled_program(lambda: model().backward()) as session:
        model.modes.clear()
        model().backward()
        session.step()
        assert settling_of(session).is_expected
    assert model.modes == [0]
