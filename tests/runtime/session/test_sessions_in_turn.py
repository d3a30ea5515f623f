"""Sessions that plan learn for each other: one for each step, function or micro-batch is as good as one around all."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.rigs.networks import perceptron
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session

BUDGET = "900KiB"
STEPS = 8


@dataclass
class Training:
    """A small training on a machine, with what it saw in each step."""

    machine: VirtualMachine
    model: nn.Module
    optimizer: torch.optim.Optimizer
    x: torch.Tensor

    def session(self, **options: Any) -> Session:
        return vdnn.offload(**{"budget": BUDGET, "device": self.machine, "min_bytes": 0, **options})

    def forward(self) -> torch.Tensor:
        return self.model(self.x).square().mean()  # type: ignore[no-any-return]

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.forward().backward()
        self.update()


@dataclass(frozen=True)
class Seen:
    peaks: list[int]
    times: list[int]
    host_bytes: int
    plans: list[bool]  # whether the step's session had one
    parameters: list[torch.Tensor]


def trained(steps: Callable[[Training], list[Callable[[], Session]]]) -> Seen:
    """`steps` returns the steps, each of which returns its session."""
    torch.manual_seed(0)
    with VirtualMachine("titan-x", fake=False) as machine:
        model = perceptron(64, 12)
        training = Training(machine, model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(256, 64))
        peaks, times, pinned, plans = [], [], [], []
        for step in steps(training):
            machine.reset_peak()
            begin_ns = machine.now_ns
            session = step()
            peaks.append(machine.peak_bytes)
            times.append(machine.now_ns - begin_ns)
            pinned.append(session.host_bytes)
            plans.append(session.plan is not None)
        return Seen(peaks, times, max(pinned), plans, [one.detach().clone() for one in model.parameters()])


def around_the_loop(training: Training) -> list[Callable[[], Session]]:
    session = training.session()

    def step() -> Session:
        with session:
            training.step()
        return session

    return [step] * STEPS


def in_each_step(training: Training) -> list[Callable[[], Session]]:
    def step() -> Session:
        with training.session() as session:
            training.step()
        return session

    return [step] * STEPS


def around_forward(training: Training) -> list[Callable[[], Session]]:
    def step() -> Session:
        with training.session() as session:
            loss = training.forward()
        loss.backward()
        training.update()
        return session

    return [step] * STEPS


def around_forward_and_backward(training: Training) -> list[Callable[[], Session]]:
    def step() -> Session:
        with training.session() as session:
            training.forward().backward()
        training.update()
        return session

    return [step] * STEPS


def as_a_decorator(training: Training) -> list[Callable[[], Session]]:
    def step() -> Session:
        session = training.session()
        session(training.step)()
        return session

    return [step] * STEPS


def nested(training: Training) -> list[Callable[[], Session]]:
    outer = training.session()

    def step() -> Session:
        with outer, training.session() as session:
            training.step()
        return session

    return [step] * STEPS


def in_each_epoch(training: Training) -> list[Callable[[], Session]]:
    sessions = [training.session() for _ in range(STEPS // 2)]

    def step(number: int) -> Session:
        with sessions[number // 2] as session:
            training.step()
        return session

    return [lambda number=number: step(number) for number in range(STEPS)]  # type: ignore[misc]


WAYS = [in_each_step, around_forward, around_forward_and_backward, as_a_decorator, nested, in_each_epoch]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_sessions_in_turn_are_as_one_around_the_loop(way: Callable[[Training], list[Callable[[], Session]]]) -> None:
    one, several = trained(around_the_loop), trained(way)
    budget_bytes = vdnn.parse_bytes(BUDGET)
    assert all(several.plans[2:])
    assert max(several.peaks[3:]) <= budget_bytes
    assert sum(several.times[3:]) <= 1.02 * sum(one.times[3:])
    assert several.host_bytes == one.host_bytes
    assert all(map(torch.equal, several.parameters, one.parameters))


@pytest.mark.slow
def test_a_session_for_each_micro_batch_plans_the_step_that_they_make() -> None:
    def around_all(training: Training) -> list[Callable[[], Session]]:
        session = training.session()

        def step() -> Session:
            with session:
                for _ in range(3):
                    training.forward().backward()
                training.update()
            return session

        return [step] * STEPS

    def in_each(training: Training) -> list[Callable[[], Session]]:
        def step() -> Session:
            for micro_batch in range(3):
                with training.session() as session:
                    training.forward().backward()
                    if micro_batch == 2:
                        training.update()
            return session

        return [step] * STEPS

    one, several = trained(around_all), trained(in_each)
    assert several.peaks[3:] == one.peaks[3:]
    assert sum(several.times[3:]) <= 1.02 * sum(one.times[3:])
    assert all(map(torch.equal, several.parameters, one.parameters))


def test_each_session_counts_its_own_saves() -> None:
    sessions: list[Session] = []

    def counted(training: Training) -> list[Callable[[], Session]]:
        def step() -> Session:
            with training.session() as session:
                training.step()
            sessions.append(session)
            return session

        return [step] * STEPS

    trained(counted)
    assert len({session.counters.saves for session in sessions}) == 1
    assert all("saves of" in session.report() for session in sessions)
    assert sessions[-1].num_steps == STEPS


def test_sessions_with_other_options_share_nothing() -> None:
    def alternating(training: Training) -> list[Callable[[], Session]]:
        def step(budget: str) -> Session:
            with training.session(budget=budget) as session:
                training.step()
            return session

        return [lambda budget=budget: step(budget) for budget in [BUDGET, "1MiB"] * STEPS]  # type: ignore[misc]

    seen = trained(alternating)
    peaks_of = seen.peaks[6::2], seen.peaks[7::2]
    assert max(peaks_of[0]) <= vdnn.parse_bytes(BUDGET) < min(peaks_of[1])
    assert max(peaks_of[1]) <= vdnn.parse_bytes("1MiB")


def test_sessions_on_two_threads_at_one_time_share_nothing() -> None:
    machine = VirtualMachine("titan-x", fake=False)
    first, second, third = (vdnn.offload(budget=BUDGET, device=machine) for _ in range(3))
    engines = []

    def enter(session: Session) -> None:
        with session:
            engines.append(session._engine)

    with first:
        for session in (second, first):
            thread = threading.Thread(target=enter, args=(session,))
            thread.start()
            thread.join()
        enter(third)
    assert engines[0] is not first._engine
    assert engines[1:] == [first._engine] * 2


def test_a_closed_session_is_followed_by_a_new_beginning() -> None:
    machine = VirtualMachine("titan-x", fake=False)
    first = vdnn.offload(budget=BUDGET, device=machine)
    vdnn.offload(budget=BUDGET, device=machine).close()  # it has nothing to close
    with first:
        pass
    first.close()
    with vdnn.offload(budget=BUDGET, device=machine) as second:
        pass
    assert second._engine is not first._engine


def test_what_was_learned_ends_with_its_device() -> None:
    machine = VirtualMachine("titan-x", fake=False)
    for number in range(20):
        with vdnn.offload(budget=f"{number + 1}MiB", device=machine):
            pass
    assert len(machine.kept_for_sessions) == 8
    engines = [weakref.ref(engine) for engine in machine.kept_for_sessions.values()]
    del machine
    gc.collect()
    assert not any(reference() for reference in engines)


def test_a_small_step_under_a_plan_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    """The last batch of an epoch may be smaller than anything that is worth a copy."""

    def a_small_one_last(training: Training) -> list[Callable[[], Session]]:
        def step() -> Session:
            with training.session(min_bytes="1KiB", recompute=False) as session:
                training.step()
            return session

        def small_step() -> Session:
            training.x = training.x[:1].clone()
            session = step()
            assert session.counters.storages == 0
            return session

        return [step, step, step, small_step]

    assert trained(a_small_one_last).plans == [True] * 4
    assert not list(recwarn)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)  # type: ignore[no-any-return]


def _blocks() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*[_Block() for _ in range(4)]), torch.randn(128, 96)


def _convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers = [
        nn.Sequential(nn.Conv2d(3 if not number else 16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        for number in range(5)
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 16 * 16, 10)), torch.randn(8, 3, 16, 16)


_Make = Callable[[], tuple[nn.Module, torch.Tensor]]


def _peaks(machine: VirtualMachine, make: _Make, steps: int, budget: int) -> list[int]:
    """The peaks of the first steps of a new model, in a session of its own."""
    torch.manual_seed(0)
    model, x = make()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    session = vdnn.offload(budget=budget, device=machine, min_bytes=0, model=model, optimizer=optimizer)
    peaks = []
    for _ in range(steps):
        with session:
            machine.tracker.peak_bytes = machine.tracker.live_bytes
            model(torch.randn_like(x)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(machine.tracker.peak_bytes)
    return peaks


@pytest.mark.parametrize("budget", [3_561_048, 4_748_064])  # 0.6 and 0.8 of what the blocks take with all kept
@pytest.mark.parametrize(("first", "second"), [(_convolutions, _blocks), (_blocks, _blocks)])
@pytest.mark.parametrize("steps", [1, 2, 6])
def test_a_second_model_keeps_within_the_budget_from_its_first_step(
    first: _Make, second: _Make, steps: int, budget: int
) -> None:
    """The first one is gone by then. Its steps, its plans and what stayed of its state say nothing of the second."""
    with VirtualMachine("h100", fake=False) as machine:
        assert max(_peaks(machine, first, steps, budget)) <= budget
        assert max(_peaks(machine, second, 7, budget)) <= budget
