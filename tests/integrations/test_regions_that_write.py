"""A compiled region that writes to its inputs: what backward recomputes starts from what forward started from."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.integrations.test_compile_options import ENOUGH, compiles_afresh, eagerly, held_bytes, partitioner
from vdnn.runtime.torch_internals import joint_graph

__all__ = ["compiles_afresh"]  # a fixture

pytestmark = [
    pytest.mark.skipif(bool(joint_graph._missing), reason=f"compiled regions need {joint_graph.NEEDED}"),
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
]

WIDTH, ROWS, STEPS = 16, 24, 3


class Writes(nn.Module):
    """Operations that every budget may recompute, on a weight and a buffer that subclasses write to."""

    checkpoints = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("average", torch.zeros(WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale: Tensor
        self.average: Tensor

    def mixed(self, x: Tensor, weight: Tensor) -> Tensor:
        hidden = torch.tanh(torch.exp(weight * 0.1)[: x.shape[1]].t() @ x.t()).t() * torch.exp(self.scale)
        return torch.cos(self.outer(torch.sin(hidden) * hidden))

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class ParameterAhead(Writes):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return self.mixed(x, self.weight)


class ParameterByData(Writes):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-1, 1).mul_(0.7)
        return self.mixed(x, self.weight)


class CounterAhead(Writes):
    def forward(self, x: Tensor) -> Tensor:
        self.scale.add_(0.5)
        return self.mixed(x, self.weight)


class AverageOfTheWeight(Writes):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.copy_(self.average * 0.9 + self.weight * 0.1)
        return self.mixed(x, self.weight) + self.mixed(x, torch.exp(self.average))


class AViewOfTheBuffer(Writes):
    def forward(self, x: Tensor) -> Tensor:
        self.average[:, 2:5].add_(0.25)
        self.average.t()[3].mul_(2)
        return self.mixed(x, self.weight + torch.exp(self.average)) * torch.sin(self.average[0] + x)


class BehindTheUse(Writes):
    def forward(self, x: Tensor) -> Tensor:
        out = self.mixed(x, torch.exp(self.average.sin()) * self.weight)
        self.average.add_(1)
        return out


class BetweenTwoUses(Writes):
    def forward(self, x: Tensor) -> Tensor:
        before = self.mixed(x, torch.exp(self.average) * self.weight)
        self.average.mul_(0.5).add_(0.25)
        return before * self.mixed(x, torch.exp(self.average) * self.weight)


class AnInput(Writes):
    def forward(self, x: Tensor) -> Tensor:
        kept = torch.exp(x)
        x.mul_(0.5)
        return self.mixed(x * kept, self.weight)


class RunningStatistics(Writes):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return self.mixed(hidden * torch.exp(self.norm.running_var.sqrt() + self.norm.running_mean), self.weight)


class TwoAliases(Writes):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alias", self.average[2:6])
        self.alias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.alias.add_(0.5)
        return self.mixed(x, self.weight * torch.exp(self.average)) + torch.exp(self.alias).sum()


class InACheckpoint(Writes):
    """The checkpoint recomputes the write's readers, and its dropout, but not the write."""

    def inner(self, x: Tensor) -> Tensor:
        self.average.add_(0.5)
        return functional.dropout(self.mixed(x, self.weight * torch.exp(self.average)), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        once: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.checkpoints else self.inner(x)
        return self.mixed(functional.dropout(once, 0.2), self.weight)


class InNestedCheckpoints(InACheckpoint):
    def middle(self, x: Tensor) -> Tensor:
        once: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.checkpoints else self.inner(x)
        self.scale.mul_(1.5)
        return self.mixed(once, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        twice: Tensor = checkpoint(self.middle, x, use_reentrant=False) if self.checkpoints else self.middle(x)
        return self.mixed(twice, self.weight)


class NoiseAndAnAssertion(Writes):
    def forward(self, x: Tensor) -> Tensor:
        self.scale.add_(torch.rand_like(self.scale))
        noise = torch.randn(ROWS, WIDTH) * torch.bernoulli(torch.full((ROWS, 1), 0.5))
        torch._assert((self.scale > 0).all(), "a scale is not above zero")
        return self.mixed(functional.dropout(x, 0.1) + torch.exp(noise), self.weight)


PROGRAMS = [
    ParameterAhead,
    ParameterByData,
    CounterAhead,
    AverageOfTheWeight,
    AViewOfTheBuffer,
    BehindTheUse,
    BetweenTwoUses,
    AnInput,
    RunningStatistics,
    TwoAliases,
    InACheckpoint,
    InNestedCheckpoints,
    NoiseAndAnAssertion,
]


def made(program: type[Writes]) -> Writes:
    torch.manual_seed(0)
    return program()


def trained(model: Writes, wrap: Callable[[Writes], Callable[..., Tensor]]) -> list[Tensor]:
    """Losses, gradients and state of some steps of a copy of `model`."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    if isinstance(model, TwoAliases):
        model.alias = model.average[2:6]
    call, values = wrap(model), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        loss = call(x + 0).square().mean()
        loss.backward()
        gradients = [one.grad.clone() for one in (x, *model.parameters()) if one.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        values += [loss.detach(), *gradients, *(one.clone() for one in model.state_dict().values())]
    return values


def compiled(model: Writes, backend: Any) -> list[Tensor]:
    def wrap(copied: Writes) -> Callable[..., Tensor]:
        copied.checkpoints = True
        return torch.compile(copied, backend=backend)  # type: ignore[return-value]

    return trained(model, wrap)


def same_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def least_bytes(model: Writes) -> int:
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(model, eagerly(partitioner(1)))
    found = re.search(r"expected at least .* \((\d+) bytes\), which the compiled region", str(caught.value))
    assert found is not None
    return int(found[1])


@pytest.mark.slow
@pytest.mark.drawn(of=4)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_region_that_writes_to_its_inputs_computes_the_bits_of_plain_at_every_budget(program: type[Writes]) -> None:
    model = made(program)
    plain = trained(model, lambda copied: copied)
    ample = partitioner(ENOUGH)
    assert same_bits(compiled(model, eagerly(ample)), plain)
    most, least = held_bytes(ample.regions[0]), least_bytes(model)
    assert least < most
    for budget, card in ((most - 1, "titan-x"), ((most + least) // 2, "h100"), (least, "h100")):
        chosen = partitioner(budget, card)
        assert same_bits(compiled(model, eagerly(chosen)), plain)
        assert all(one.peak_bytes <= budget for one in chosen.regions)
        assert chosen.regions[0].by != "min-cut" or chosen.regions[0].offloaded_bytes


@pytest.mark.slow
def test_without_pre_images_the_same_programs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_graph, "keep_preimages", lambda *_: None)
    found = []
    for program in (ParameterAhead, CounterAhead, BetweenTwoUses):
        model = made(program)
        plain = trained(model, lambda copied: copied)
        found.append(same_bits(compiled(model, eagerly(partitioner(least_bytes(model)))), plain))
    assert not any(found)


def test_a_pre_image_that_backward_does_not_need_is_not_made() -> None:
    graphs: list[torch.fx.GraphModule] = []

    class Watched(type(partitioner(ENOUGH))):  # type: ignore[misc]
        def __call__(self, *given: Any, **named: Any) -> Any:
            found = super().__call__(*given, **named)
            graphs.append(found[0])
            return found

    plain = partitioner(ENOUGH)
    compiled(made(RunningStatistics), eagerly(Watched(plain.budget_bytes, plain._profile)))
    forward = graphs[0].graph
    written = forward.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert len(written) == 3
    assert not forward.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
