"""The measured step of the compiled benchmark counts what a region saves beside its inputs, whoever owns them."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from benchmarks.compiled.measured import Backend, aot_eager, difference, equal_bits, measured_step
from vdnn.hardware import load_profile
from vdnn.integrations.compile_options import BudgetPartitioner

WIDTH = 16
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")


class Closing(nn.Module):
    """Calls its layers through a function that holds them: a deep copy of it calls those of the original."""

    def __init__(self) -> None:
        super().__init__()
        inner, outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inner, self.outer = inner, outer
        self.norm = nn.BatchNorm1d(WIDTH)
        self.both = lambda x: outer(torch.tanh(inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (x + self.both(self.norm(x))).square().mean()
        return loss


@pytest.fixture(autouse=True)
def compiles_afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Closing(), (torch.randn(8, WIDTH),)


def planned(budget: int) -> tuple[BudgetPartitioner, Backend]:
    partitioner = BudgetPartitioner(budget, load_profile("h100"))
    return partitioner, aot_eager(partitioner)


@pytest.mark.slow
def test_weights_that_reach_a_region_through_a_closure_are_its_inputs_and_not_saved_in_addition() -> None:
    model, inputs = made()
    copied = copy.deepcopy(model)
    ample, backend = planned(1 << 40)
    run = measured_step(copied, inputs, backend)
    [choice] = ample.regions
    borrowed = sum(one.nbytes for one in (*model.inner.parameters(), *model.outer.parameters()))
    assert choice.inputs_and_outputs_bytes > borrowed
    assert run.saved_bytes == choice.saved_bytes
    tight, backend = planned(choice.inputs_and_outputs_bytes + choice.saved_bytes // 2)
    assert measured_step(copied, inputs, backend).saved_bytes == tight.regions[0].saved_bytes <= choice.saved_bytes // 2


def test_each_measured_step_begins_with_the_buffers_and_the_gradients_of_the_first() -> None:
    model, inputs = made()
    state = copy.deepcopy(model.state_dict())
    first = measured_step(model, inputs, aot_eager(None))
    second = measured_step(model, inputs, aot_eager(None))
    assert equal_bits(first, second)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert len(first.values) == 1 + len(list(model.buffers())) + len(list(model.parameters()))
    assert first.regions == 1


def test_a_step_that_computes_something_else_is_told_apart() -> None:
    model, inputs = made()
    right = measured_step(model, inputs, aot_eager(None))
    wrong = measured_step(model, (inputs[0] * 1.001,), aot_eager(None))
    assert not equal_bits(right, wrong)
    assert difference(right, wrong) > 0


def test_the_table_counts_what_is_equal_and_what_is_as_planned() -> None:
    from benchmarks.compiled.bits import BitsRow, table_of  # imports all of inductor

    exact = BitsRow("one", "aot_eager", 1, 100, 200, 0, 50, 50, equal=True)
    wrong = BitsRow("two", "aot_eager", 1, 100, 200, 0, 50, 60, difference=0.5)
    broken = BitsRow("three", "aot_eager", error="RuntimeError: it has no graph")
    text = " ".join(table_of([exact, wrong, broken]).split())
    assert "2 networks" in text
    assert "bit for bit in 1 of 2 rows" in text
    assert "to the byte, in 1." in text
    assert "RuntimeError: it has no graph" in text
