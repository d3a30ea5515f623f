"""The cases of changing shapes made small, on real tensors: a session leaves every bit of the training as it was.

Each case has the sizes of its own steps, divided, and begun again until there are 50 of them. It is trained twice on a
virtual machine, without a session and under the budget of the benchmark. Gradients before each step of an optimizer,
and parameters and states of optimizers at the end, must have the same bits.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import vdnn
from benchmarks.shapes.cases import (
    CASES,
    Case,
    Size,
    Subject,
    convolutions,
    decoder,
    encoder,
    evaluated,
    micro_batches,
    mixture,
    two_models,
)
from benchmarks.shapes.measure import BUDGET_SHARE, HARDWARE
from benchmarks.shapes.networks import Decoder, Encoder, Shape
from tests.runtime.rigs.side_by_side import same_bits
from vdnn.runtime.session.session import Session

STEPS = 50
TINY = Shape(vocabulary=50, width=32, heads=2, layers=2)
WIDER = replace(TINY, width=64)
EXPERTS = replace(TINY, experts=4)
ONE_STAGE = (2,)

# By the name of a case: what makes it small, and the divisors of its sizes. Texts have 4 to 64 tokens, images sides of
# 12 to 28.
SMALL: dict[str, tuple[Callable[[], Subject], Sequence[int]]] = {
    "decoder": (partial(decoder, 8, TINY), [16]),
    "padded encoder": (partial(encoder, TINY), [4, 8]),
    "encoder by tokens": (partial(encoder, TINY), [8, 8]),
    "multi-scale images": (partial(convolutions, ONE_STAGE), [2, 16]),
    "smaller last batch": (partial(convolutions, ONE_STAGE), [2, 8]),
    "four micro-batches": (partial(micro_batches, 8, TINY), [16, 16, 16, 16]),
    "two models in turn": (partial(two_models, 8, (TINY, WIDER)), [1, 16]),
    "evaluation and extra loss": (partial(evaluated, 8, TINY), [16, 1]),
    "mixture of experts": (partial(mixture, 8, 32, EXPERTS), [1]),
    "length curriculum": (partial(decoder, 8, TINY), [16]),
    "session per step": (partial(decoder, 8, TINY), [16]),
}


def small(case: Case) -> Case:
    make, divisors = SMALL[case.name]

    def divided(size: Size) -> Size:
        pairs = zip(size, divisors, strict=True)
        return tuple(one // divisor if isinstance(one, int) else one for one, divisor in pairs)

    return replace(case, make=make, sizes=tuple(map(divided, itertools.islice(itertools.cycle(case.sizes), STEPS))))


@dataclass
class Trained:
    """`gradients` has a list for each step of an optimizer. `left` has the parameters at the end, each followed by its
    states. A parameter without a gradient has None."""

    gradients: list[list[torch.Tensor | None]] = field(default_factory=list)
    left: list[torch.Tensor] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)

    def keep_gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The hook that an optimizer calls before each of its steps."""
        with _disable_current_modes():  # a machine would count the clones
            found = [parameter.grad for parameter in parameters_of(optimizer)]
            self.gradients.append([None if one is None else one.clone() for one in found])


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def left_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for parameter in parameters_of(optimizer):
        yield parameter.detach()
        yield from (state for state in optimizer.state[parameter].values() if state is not None)


def trained(case: Case, budget_bytes: int | None = None, *, seed: int = 0) -> Trained:
    """Trains all steps of a case, without a session if there is no budget. The seed gives parameters and data."""
    done = Trained()
    with (
        vdnn.VirtualMachine(HARDWARE, fake=False) as machine,
        torch.random.fork_rng(),
        contextlib.ExitStack() as around,
    ):
        torch.manual_seed(seed)
        subject = case.make()
        for optimizer in subject.optimizers:
            optimizer.register_step_pre_hook(done.keep_gradients)
        for index, size in enumerate(case.sizes):
            if budget_bytes is not None and (case.has_session_per_step or index == 0):
                around.close()
                done.sessions.append(vdnn.offload(budget=budget_bytes, device=machine, min_bytes=0))
                around.enter_context(done.sessions[-1])
            machine.reset_peak()
            subject.train(size)
            done.peaks.append(machine.peak_bytes)
        done.left = [one for optimizer in subject.optimizers for one in left_by(optimizer)]
    return done


def differences(plain: Trained, ours: Trained) -> list[str]:
    """Says which tensors have other bits: gradients by their step and parameter, what is left by its place."""
    found = [
        f"gradient {place} of step {step}"
        for step, pairs in enumerate(zip(plain.gradients, ours.gradients, strict=True))
        for place, pair in enumerate(zip(*pairs, strict=True))
        if not same_bits(*pair)
    ]
    left = enumerate(zip(plain.left, ours.left, strict=True))
    return found + [f"parameter or state {place}" for place, pair in left if not same_bits(*pair)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The operations are tiny: threads would only spin."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.drawn(of=4)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_under_a_budget_has_the_bits_of_plain_training(case: Case) -> None:
    tiny = small(case)
    plain = trained(tiny)
    ours = trained(tiny, int(BUDGET_SHARE * max(plain.peaks)))
    assert len(plain.gradients) == STEPS
    assert differences(plain, ours) == []
    # Something moved, under plans.
    counters = [session.counters for session in ours.sessions]
    assert len(counters) == (STEPS if case.has_session_per_step else 1)
    assert sum(one.storages + one.discarded for one in counters) > 0
    assert max(ours.peaks) < max(plain.peaks)
    use = ours.sessions[-1]._engine.steps.plan_use
    assert use is not None
    assert sum(one.steps for one in use.counts if one.followed.is_planned) > STEPS // 2


def test_a_difference_is_found() -> None:
    tiny = replace(small(CASES[0]), sizes=((8,),) * 2)
    plain = trained(tiny)
    assert differences(plain, trained(tiny)) == []
    gradients, left = (sum(map(len, plain.gradients)), len(plain.left))
    assert 0 < len(differences(plain, trained(tiny, seed=1))) <= gradients + left
    other = trained(tiny)
    for one in (other.gradients[1][3], other.left[-1]):
        assert one is not None
        one.view(torch.int32).flatten()[0] ^= 1
    assert differences(plain, other) == ["gradient 3 of step 1", f"parameter or state {left - 1}"]


@pytest.mark.parametrize("kind", [Decoder, Encoder])
def test_data_is_drawn_for_each_step(kind: type[Decoder | Encoder]) -> None:
    model = kind(TINY)
    assert model.loss(4, 8).item() != model.loss(4, 8).item()
