"""The gate discards and restores what a settled plan recomputes; whatever is not as planned falls back to Python."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.runtime.rigs.settled_steps import settling_of
from tests.runtime.steps.test_settled_recomputes import events_of, settled_program
from vdnn._C import LightSave
from vdnn.errors import VdnnError
from vdnn.runtime.recompute import Recipe
from vdnn.runtime.recompute.table import operation_of
from vdnn.runtime.session.light_storages import LightStorages
from vdnn.runtime.session.session import Session

pytestmark = pytest.mark.filterwarnings("ignore::vdnn.user_warnings.VdnnWarning")

LAYERS, _WIDTH = 6, 16


class Program:
    """Each layer saves a tangent, which can be recomputed, and its sine, whose recipe reads the tangent."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.weights = [(torch.randn(_WIDTH, _WIDTH, generator=generator) / 4).requires_grad_() for _ in range(LAYERS)]
        self.x = torch.randn(8, _WIDTH, generator=generator)
        self.held: list[torch.Tensor] = []

    def forward(self, *, holds: bool = False, within: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
        y = self.x
        for number, weight in enumerate(self.weights):
            y = (y @ weight).tanh()
            z = y.sin()
            if holds:
                self.held += [y.detach(), z.detach()]
            if within is not None and number == LAYERS // 2:
                y = within(y)
            y = y + z.cos()
        return y.square().mean()

    def step(self, **options: Any) -> list[torch.Tensor]:
        return list(torch.autograd.grad(self.forward(**options), self.weights))


@contextlib.contextmanager
def settled(program: Program) -> Iterator[tuple[Session, list[object]]]:
    """A session whose steps are settled, and a list of what was discarded and is handed over from now on."""
    handed_over: list[object] = []
    original = LightStorages._hand_over

    def hand_over(self: LightStorages, *arguments: Any) -> Any:
        if arguments[-1] is not None:
            handed_over.append(arguments[-1])
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LightStorages, "_hand_over", hand_over)
        with settled_program(program.step) as session:
            handed_over.clear()
            yield session, handed_over


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_settled_step_discards_and_restores_without_a_record_of_python() -> None:
    program = Program()
    expected = program.step()
    with settled(program) as (session, _):
        saves = session._engine.saves
        before, managed = session.counters.recomputes, len(saves.managed)
        loss = program.forward()
        mover = saves.readers.mover
        assert mover is not None
        assert mover.has_discarded
        assert len(saves.managed) <= managed + 1, "the first save of a step is Python's"
        assert same(list(torch.autograd.grad(loss, program.weights)), expected)
        discarded = [one for one in events_of(session) if one.is_new and one.moving and one.moving.is_discarded]
        session.step()
        assert len(discarded) >= LAYERS
        assert session.counters.recomputes - before >= len(discarded)
        assert settling_of(session).is_expected


def second_backward(program: Program) -> list[torch.Tensor]:
    loss = program.forward()
    first = torch.autograd.grad(loss, program.weights, retain_graph=True)
    return [*first, *torch.autograd.grad(loss, program.weights)]


def gradient_of_a_gradient(program: Program) -> list[torch.Tensor]:
    first = torch.autograd.grad(program.forward(), program.weights, create_graph=True)
    return list(torch.autograd.grad(sum(one.square().sum() for one in first), program.weights))


def two_losses_in_turn(program: Program) -> list[torch.Tensor]:
    first, second = program.forward(), program.forward()
    return [*torch.autograd.grad(second, program.weights), *torch.autograd.grad(first, program.weights)]


def another_operation_in_the_middle(program: Program) -> list[torch.Tensor]:
    return program.step(within=torch.exp)


def a_part_of_the_graph_first(program: Program) -> list[torch.Tensor]:
    loss = program.forward()
    last = torch.autograd.grad(loss, program.weights[-1:], retain_graph=True)
    return [*last, *torch.autograd.grad(loss, program.weights)]


@pytest.mark.parametrize(
    "changed",
    [
        second_backward,
        gradient_of_a_gradient,
        two_losses_in_turn,
        another_operation_in_the_middle,
        a_part_of_the_graph_first,
    ],
)
def test_a_step_that_differs_is_continued_by_python(changed: Callable[[Program], list[torch.Tensor]]) -> None:
    program = Program()
    expected, plain = changed(program), program.step()
    with settled(program) as (session, handed_over):
        found = changed(program)
        assert same(found, expected)
        assert handed_over
        session.step()
        assert same(program.step(), plain)


def test_a_graph_may_outlive_its_session() -> None:
    program = Program()
    expected = program.step()
    with settled(program) as (session, handed_over):
        loss = program.forward()
        session.step()
        assert len(handed_over) >= LAYERS
    assert same(list(torch.autograd.grad(loss, program.weights)), expected)


def test_a_graph_that_is_dropped_frees_what_was_discarded() -> None:
    program = Program()
    with settled(program) as (session, _):
        mover = session._engine.saves.readers.mover
        loss = program.forward()
        assert mover is not None
        saves = mover.discarded()
        assert saves
        assert all(type(one) is LightSave and one.is_missing for one in saves)
        del loss, saves
        gc.collect()
        assert not mover.has_discarded
        assert mover.discarded() == []


def test_what_the_program_holds_is_used_in_place() -> None:
    program = Program()
    expected = program.step()
    with settled(program) as (session, _):
        before = session.counters.recomputes
        found = program.step(holds=True)
        session.step()
        assert same(found, expected)
        held = session.counters.recomputes - before
        program.held.clear()
        program.step()
        session.step()
        assert session.counters.recomputes - before - held > held


def test_an_error_of_a_recompute_names_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program()
    expected = program.step()
    with settled(program) as (session, _):
        loss = program.forward()
        operation = operation_of(program.weights[0].exp().tanh().grad_fn)
        assert operation is not None

        def fails(*arguments: Any) -> torch.Tensor:
            raise RuntimeError("no kernel")

        run = operation.run
        object.__setattr__(operation, "run", fails)
        try:
            with pytest.raises(VdnnError, match=r"float32 \[8, 16\] saved in no module: cannot recompute .*no kernel"):
                torch.autograd.grad(loss, program.weights)
        finally:
            object.__setattr__(operation, "run", run)
        session.step()
        for _ in range(3):
            assert same(program.step(), expected)
            session.step()


def test_an_interrupt_in_a_recompute_or_a_search_leaves_the_next_steps_right() -> None:
    program = Program()
    expected = program.step()
    with settled(program) as (session, _):
        settled_hooks = session._engine.packer._settled
        assert settled_hooks is not None
        for place in ((settled_hooks._saves.recipes, "proven"), (Recipe, "recompute")):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(*place, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    program.step()
            session.step()
            assert torch.is_grad_enabled()
            for _ in range(3):
                assert same(program.step(), expected)
                session.step()


def interrupted(*arguments: object) -> object:
    raise KeyboardInterrupt


def test_a_write_to_a_save_that_was_discarded_raises_as_in_plain_torch() -> None:
    program = Program()

    def write(y: torch.Tensor) -> torch.Tensor:
        z = y * 1.0
        with torch.no_grad():
            y.mul_(2.0)
        return z

    plain = program.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        program.step(within=write)
    with settled(program) as (session, _):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            program.step(within=write)
        session.step()
        assert same(program.step(), plain)


class Gated(Program):
    """Two products read one sum, each through a save of its own, as in the feed-forward layers of Llama."""

    def forward(self, *, holds: bool = False, within: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
        y = self.x
        for first, second in zip(self.weights[::2], self.weights[1::2], strict=True):
            normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1.0)
            y = y + torch.nn.functional.silu(normed @ first) * (normed @ second)
        return y.square().mean()


def test_a_storage_is_recomputed_once_for_a_chain_that_reads_several_saves_of_it() -> None:
    program = Gated()
    expected = program.step()
    with settled(program) as (session, _):
        before = session.counters.recomputes
        assert same(program.step(), expected)
        discarded = [one for one in events_of(session) if one.is_new and one.moving and one.moving.is_discarded]
        session.step()
        assert settling_of(session).is_expected
        assert session.counters.recomputes - before == len(discarded) > LAYERS
