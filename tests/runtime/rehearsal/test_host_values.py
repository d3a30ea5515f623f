"""A program that is rehearsed without data reads small values as they are, and gets stand-ins for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy
import pytest
import torch
from torch import nn

from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.host_values import HostValues
from vdnn.runtime.rehearsal.known_values import MOST_BYTES
from vdnn.runtime.rehearsal.stage import stage


@pytest.fixture
def values() -> Iterator[HostValues]:
    with VirtualMachine("h100") as machine, stage(machine) as values:
        yield values


KNOWN: dict[str, tuple[Callable[[], object], object]] = {
    "tensor": (lambda: torch.tensor([3, 1, 2]).max().item(), 3),
    "arange": (lambda: torch.arange(5).tolist(), [0, 1, 2, 3, 4]),
    "linspace": (lambda: [one.item() for one in torch.linspace(0, 1, 3)], [0.0, 0.5, 1.0]),
    "ones": (lambda: bool(torch.ones(2, 8).all()), True),
    "sum": (lambda: int(torch.ones(4, 3, dtype=torch.long).sum(-1)[2]), 3),
    "view": (lambda: torch.arange(6).view(2, 3)[1].tolist(), [3, 4, 5]),
    "rows": (lambda: torch.arange(4).view(2, 2).tolist(), [[0, 1], [2, 3]]),
    "nonzero": (lambda: torch.tensor([0, 1, 0, 1]).nonzero().flatten().tolist(), [1, 3]),
    "where": (lambda: torch.where(torch.eye(2))[1].tolist(), [0, 1]),
    "mask": (lambda: torch.arange(4)[torch.tensor([True, False, True, False])].tolist(), [0, 2]),
    "masked_select": (lambda: torch.arange(4).masked_select(torch.arange(4) > 1).tolist(), [2, 3]),
    "unique": (lambda: torch.tensor([2, 2, 5]).unique().tolist(), [2, 5]),
    "bincount": (lambda: torch.tensor([0, 2, 2]).bincount().tolist(), [1, 0, 2]),
    "repeat_interleave": (lambda: torch.arange(2).repeat_interleave(torch.tensor([2, 1])).tolist(), [0, 0, 1]),
    "equal": (lambda: torch.equal(torch.ones(2), torch.zeros(2)), False),
    "numpy": (lambda: torch.arange(3).numpy().tolist(), [0, 1, 2]),
    "asarray": (lambda: numpy.asarray(torch.arange(3)).sum(), 3),
    "drawn integers": (lambda: bool((torch.randint(5, 9, (100,)) >= 5).all()), True),
    "permutation": (lambda: sorted(torch.randperm(4).tolist()), [0, 1, 2, 3]),
    "parameter": (lambda: nn.LayerNorm(4).weight.sum().item(), 4.0),
    "buffer": (lambda: int(nn.BatchNorm1d(4).num_batches_tracked), 0),
    "moved": (lambda: torch.arange(3, device="cuda").to("cuda", torch.float32)[2].item(), 2.0),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_value_made_without_data_is_read_as_it_is(name: str, values: HostValues) -> None:
    read, expected = KNOWN[name]
    assert read() == expected
    assert values.stand_ins.given == ()


def test_a_write_is_seen_through_every_view(values: HostValues) -> None:
    base = torch.zeros(4)
    part, detached = base[1:3], base.detach()
    part.fill_(7)
    base[0] = 1
    assert detached.tolist() == [1.0, 7.0, 7.0, 0.0]
    part.copy_(torch.randn(2))
    assert values.stand_ins.given == ()
    detached[1].item()
    assert len(values.stand_ins.given) == 1, "what was overwritten with data is not known any more"
    detached.zero_()
    assert base.tolist() == [0.0] * 4
    assert len(values.stand_ins.given) == 1


def test_large_tensors_and_weights_have_no_values(values: HostValues) -> None:
    at_most, above = torch.ones(MOST_BYTES // 4), torch.ones(MOST_BYTES // 4 + 1)
    assert at_most.sum().item() == MOST_BYTES // 4
    assert values.stand_ins.given == ()
    above.sum().item()
    nn.Linear(4, 4).weight.sum().item()
    assert sum(one.count for one in values.stand_ins.given) == 2


def test_a_known_value_is_not_memory_of_the_card() -> None:
    with VirtualMachine("h100") as machine, stage(machine):
        kept = torch.arange(1000)
        assert machine.allocated_bytes == 8000
        assert kept[3].item() == 3
        assert machine.allocated_bytes == 8000
        del kept
        assert machine.allocated_bytes == 0


@pytest.mark.parametrize(
    ("read", "answer"),
    [
        (lambda loss: loss.item(), 1.0),
        (lambda loss: bool(loss.isnan()), False),
        (lambda loss: bool(loss.isnan().sum() == 0), True),
        (lambda loss: bool(loss.isnan().sum() != 0), False),
        (lambda loss: bool(torch.isfinite(loss)), True),
        (lambda loss: bool(torch.isinf(loss).any() | torch.isnan(loss).any()), False),
        (lambda loss: bool((loss == loss).all()), True),
        (lambda loss: bool(torch.isfinite(loss) * loss.isnan()), False),
        (lambda loss: bool(torch.rand([]) < 0.1), False),
    ],
)
def test_a_value_that_depends_on_data_is_finite_and_named(
    read: Callable[[torch.Tensor], object], answer: object, values: HostValues
) -> None:
    assert read(torch.randn(8).square().mean()) == answer
    (given,) = values.stand_ins.given
    assert "test_host_values.py:" in given.place
    assert str(answer).removesuffix(".0") in given.answer


def test_a_number_is_formatted_as_on_a_gpu(values: HostValues) -> None:
    """A program may name a module by an index, as Switch Transformers names its experts."""
    assert f"expert_{torch.arange(4)[2]}" == "expert_2"
    assert f"{torch.tensor(0.25):.3f}" == "0.250"
    assert values.stand_ins.given == ()
    assert f"{nn.Linear(4, 4)(torch.randn(4)).mean():.2f}" == "1.00"
    assert len(values.stand_ins.given) == 1, "the format of what depends on data is a stand-in"


def test_new_data_of_a_parameter_is_what_is_computed_with(values: HostValues) -> None:
    """FakeTensorMode computes with the number that it has of a tensor of one element, in the dtype of that number."""
    slope = nn.Parameter(torch.tensor(0.5))
    assert slope.constant is not None  # type: ignore[attr-defined]
    module = nn.Module()
    module.slope = slope
    module.to(torch.bfloat16)
    assert nn.functional.softplus(slope).dtype == slope.dtype == torch.bfloat16
    slope.data = torch.tensor(2.0)
    assert slope.unsqueeze(0).square().item() == 4.0
    slope.data = torch.randn([])
    slope.detach().square().item()
    assert len(values.stand_ins.given) == 1


def test_tokens_are_routed_evenly(values: HostValues) -> None:
    """As transformers loops over experts: each expert gets its share, and a list of sizes adds up."""
    tokens, experts, chosen = 96, 8, 2
    picks = torch.randn(tokens, experts).softmax(-1).topk(chosen, -1).indices
    mask = nn.functional.one_hot(picks, experts).permute(2, 1, 0)
    hit = (mask.sum((-1, -2)) > 0).nonzero()
    assert [int(one[0]) for one in hit] == list(range(experts))
    for expert in hit:
        assert torch.where(mask[expert[0]])[1].shape == (tokens * chosen // experts,)
    assert (picks == 3).nonzero().shape == (tokens * chosen // experts, 2)
    sizes = torch.bincount(picks.flatten(), minlength=experts).tolist()
    assert sizes == [tokens * chosen // experts] * experts
    assert torch.randn(tokens * chosen, 4).split(sizes)[0].shape == (24, 4)
    assert values.stand_ins.given


def test_random_branches_repeat() -> None:
    def drawn() -> list[object]:
        with VirtualMachine("h100") as machine, stage(machine):
            return [torch.randint(1000, (4,)).tolist(), numpy.random.rand(), __import__("random").random()]

    before = torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    assert drawn() == drawn()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert numpy.random.get_state()[1].tolist() == before[1]
