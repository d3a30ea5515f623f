"""Code that torch.compile would run as CUDA graphs is refused before it trains, also on the CPU, naming both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.integrations.parallel_training import BATCH, WIDTH, Block
from vdnn.errors import CombinationError
from vdnn.runtime.session.session import Session
from vdnn.runtime.torch_internals.cuda_graphs import refuse_graphs_of, uses_graphs

REFUSED = r"vdnn.offload does not work with the CUDA graphs of torch.compile {}: .* mode='default' or 'max-autotune-no-"
GRAPHS: list[dict[str, Any]] = [
    {"mode": "reduce-overhead"},
    {"mode": "max-autotune"},
    {"options": {"triton.cudagraphs": True}},
    {"backend": "cudagraphs"},
]
NO_GRAPHS: list[dict[str, Any]] = [
    {},
    {"mode": "max-autotune-no-cudagraphs"},
    {"options": {"triton.cudagraphs": False}},
    {"backend": "aot_eager"},
]
# Warnings of torch's own code, which it raises without vdnn too.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning",
    "ignore:The .grad attribute:UserWarning",
    "ignore:Using `torch.compile:UserWarning",  # raised if there are global module hooks
)


@pytest.fixture(autouse=True)
def _forgets_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def moving() -> Iterator[Session]:
    with vdnn.offload("vdnn-all", device="sim", min_bytes=0) as session:
        yield session
    session.close()


def batch() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)


class Model(nn.Module):
    """Counts how many times its forward has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.begun = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.begun += 1
        return self.second(self.first(x))


def whole(model: Model) -> nn.Module:
    compiled: nn.Module = torch.compile(model, mode="reduce-overhead")
    return compiled


def a_layer_in_place(model: Model) -> nn.Module:
    model.second.compile(mode="reduce-overhead")
    return model


def a_layer_wrapped(model: Model) -> nn.Module:
    model.second = torch.compile(model.second, mode="reduce-overhead")
    return model


def a_forward(model: Model) -> nn.Module:
    model.second.forward = torch.compile(model.second.forward, mode="reduce-overhead")  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("options", GRAPHS, ids=str)
def test_what_asks_for_graphs_is_recognised(options: dict[str, Any]) -> None:
    assert uses_graphs(torch.compile(batch, **options))


@pytest.mark.parametrize("options", NO_GRAPHS, ids=str)
def test_what_asks_for_none_is_not(options: dict[str, Any]) -> None:
    assert not uses_graphs(torch.compile(batch, **options))
    assert not uses_graphs(batch)


def test_graphs_that_inductor_makes_by_its_configuration_are_recognised() -> None:
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert uses_graphs(torch.compile(batch))
        assert not uses_graphs(torch.compile(batch, options={"triton.cudagraphs": False}))


@pytest.mark.parametrize(
    ("compiles", "where"),
    [
        (whole, "around the OptimizedModule"),
        (a_layer_in_place, "in 'second'"),
        (a_layer_wrapped, "in 'second'"),
        (a_forward, "in 'second'"),
    ],
)
def test_a_model_with_graphs_is_refused_before_its_first_forward(
    moving: Session, compiles: Callable[[Model], nn.Module], where: str
) -> None:
    inner = Model()
    model = compiles(inner)
    with pytest.raises(CombinationError, match=REFUSED.format(where)):
        model(batch())
    assert inner.begun == 0
    assert moving.counters.saves == 0


def test_what_is_compiled_and_no_part_of_a_called_module_is_refused_at_its_first_save(moving: Session) -> None:
    """A function, and a model that was compiled in place: torch calls no module hooks before they run."""
    model = Model()
    model.compile(backend="cudagraphs")
    with pytest.raises(CombinationError, match=REFUSED.format("around Module._call_impl")):
        model(batch())
    loss = torch.compile(lambda x: x.sin().exp(), backend="cudagraphs")
    with pytest.raises(CombinationError, match=REFUSED.format(r"around .*<lambda>")):
        loss(batch().requires_grad_())
    assert moving.counters.storages == 0


def test_what_does_not_move_may_be_graphs(moving: Session) -> None:
    """Graphs are allowed without gradients, while paused, and in a marked module, also beside trained modules."""
    model = Model()
    model.second.compile(backend="cudagraphs")
    with torch.no_grad():
        model(batch())
    with vdnn.paused():
        model(batch()).sum().backward()
    Block()(batch()).sum().backward()
    moved = moving.counters.storages
    assert moved
    vdnn.keep(model)
    model(batch()).sum().backward()
    assert moving.counters.storages == moved


def test_the_options_of_a_trainer_are_judged_without_a_model() -> None:
    refuse_graphs_of("inductor", None)
    refuse_graphs_of("aot_eager", None)
    for backend, mode in (("inductor", "reduce-overhead"), ("inductor", "max-autotune"), ("cudagraphs", None)):
        with pytest.raises(CombinationError, match=REFUSED.format(f"by backend='{backend}', mode={mode!r}")):
            refuse_graphs_of(backend, mode)
