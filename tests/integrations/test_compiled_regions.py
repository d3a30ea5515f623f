"""Regions of one model: between graph breaks, of DDP's buckets and of FSDP2's layers, each under the budget."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.compiled.measured import aot_eager, equal_bits, measured_step
from tests.integrations import compiled_ranks
from tests.integrations.ranks import Ranks
from tests.integrations.test_compile_options import Blocks, compiles_afresh, partitioner

__all__ = ["compiles_afresh"]  # a fixture

pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")


class Broken(nn.Module):
    """Two regions with a graph break between them, and a loss that the second one computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Blocks(depth=1), Blocks(depth=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        loss: Tensor = self.second(x).square().mean()
        return loss


@pytest.mark.slow
def test_both_regions_around_a_graph_break_keep_the_budget_with_the_same_bits() -> None:
    torch.manual_seed(0)
    model, inputs = Broken(), (torch.randn(64, 32, requires_grad=True),)
    plain = measured_step(model, inputs, aot_eager(None))
    ample = partitioner(1 << 40)
    measured_step(model, inputs, aot_eager(ample))
    least = min(one.inputs_and_outputs_bytes + one.saved_bytes for one in ample.regions)
    tight = partitioner(least - min(one.saved_bytes for one in ample.regions) // 4, "titan-x")
    ours = measured_step(model, inputs, aot_eager(tight))
    assert equal_bits(ours, plain)
    assert plain.regions == len(tight.regions) == 2
    assert all(one.by != "min-cut" or one.offloaded_bytes for one in tight.regions)
    assert all(one.peak_bytes <= tight.budget_bytes for one in tight.regions)
    assert ours.saved_bytes == sum(one.saved_bytes for one in tight.regions)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_regions_of_two_ranks_train_the_same_under_a_budget(two_ranks: Ranks, kind: str) -> None:
    for facts in two_ranks.run(compiled_ranks.regions_under_a_budget, kind):
        assert facts["equal"] == [True, True]
        assert facts["regions"] > 1
        assert facts["planned"] > 0
        assert max(facts["peaks"]) <= facts["budget"]
