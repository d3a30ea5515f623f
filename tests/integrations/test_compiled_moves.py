"""Values of a compiled region that the plan offloads are away between forward and backward, with the same bits."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import vdnn
from tests.integrations.test_compile_options import (
    ENOUGH,
    compiles_afresh,
    eagerly,
    held_bytes,
    made,
    partitioner,
    stepped,
)
from vdnn.integrations.compile_options import BudgetPartitioner
from vdnn.runtime.storage import graph_copies
from vdnn.runtime.torch_internals import joint_graph

__all__ = ["compiles_afresh"]  # a fixture

# Torch warns of its own code while Inductor is imported.
pytestmark = [
    pytest.mark.skipif(bool(joint_graph._missing), reason=f"compiled regions need {joint_graph.NEEDED}"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning"),
]

# A card whose link is as fast as its memory, so that offloading is the cheapest.
SLOW_CARD = "titan-x"


def offloading(name: str, share: float) -> tuple[BudgetPartitioner, torch.nn.Module, Tensor, Any]:
    """A partitioner whose budget leaves `share` of what torch saves, the model, its input and plain's step."""
    model, x = made(name)
    ample = partitioner(ENOUGH)
    plain = stepped(model, x, backend=eagerly(ample))
    most = ample.regions[0]
    return partitioner(held_bytes(most) - int((1 - share) * most.saved_bytes), SLOW_CARD), model, x, plain


def test_what_is_offloaded_is_on_the_host_between_forward_and_backward() -> None:
    chosen, model, x, plain = offloading("blocks", 0.6)
    queue = graph_copies.transport_for(x.device).queue
    before = queue.stats.offloaded_bytes, queue.stats.reloaded_bytes
    run = stepped(model, x, backend=eagerly(chosen))
    [choice] = chosen.regions
    assert choice.offloaded_bytes > 0
    assert queue.stats.offloaded_bytes - before[0] == choice.offloaded_bytes
    assert queue.stats.reloaded_bytes - before[1] == choice.offloaded_bytes
    assert run.saved_bytes == choice.saved_bytes
    assert choice.inputs_and_outputs_bytes + choice.saved_bytes <= choice.peak_bytes <= chosen.budget_bytes
    assert all(map(torch.equal, run.values, plain.values))


@pytest.mark.slow
def test_backward_runs_again_from_the_same_copies() -> None:
    chosen, model, x, _ = offloading("convolutions", 0.9)
    torch._dynamo.reset()
    out = torch.compile(copy.deepcopy(model), backend=eagerly(chosen))(x.requires_grad_())
    first, second = (torch.autograd.grad(out.square().mean(), x, retain_graph=True)[0] for _ in range(2))
    assert chosen.regions[0].offloaded_bytes > 0
    assert torch.equal(first, second)


def test_a_graph_that_dies_without_a_backward_frees_its_copies() -> None:
    chosen, model, x, _ = offloading("convolutions", 0.9)
    torch._dynamo.reset()
    out = torch.compile(copy.deepcopy(model), backend=eagerly(chosen))(x)
    assert chosen.regions[0].offloaded_bytes > 0
    assert len(graph_copies.copies()) > 0
    del out
    gc.collect()
    assert not graph_copies.copies()


@pytest.mark.slow
def test_without_offload_values_are_recomputed_alone() -> None:
    chosen, model, x, plain = offloading("convolutions", 0.9)
    options = vdnn.compile_options(chosen.budget_bytes, SLOW_CARD, offload=False)
    alone = options["custom_partitioner_fn"]
    run = stepped(model, x, backend=eagerly(alone))
    assert alone.regions[0].offloaded_bytes == 0
    assert run.saved_bytes == alone.regions[0].saved_bytes
    assert all(map(torch.equal, run.values, plain.values))
    assert alone.uuid() != chosen.uuid()


@pytest.mark.slow
def test_cuda_graphs_are_refused_while_something_is_offloaded() -> None:
    chosen, model, x, _ = offloading("convolutions", 0.9)
    sentence = "CombinationError: vdnn.compile_options does not work with the CUDA graphs of torch.compile: under this"
    refused = pytest.raises(BackendCompilerFailed, match=sentence)
    with torch._inductor.config.patch({"triton.cudagraphs": True}), refused:
        stepped(model, x, backend=eagerly(chosen))


@pytest.mark.parametrize("strides", [(16, 1), (1, 8), (0, 1), (32, 2)])
def test_a_copy_comes_back_with_its_strides(strides: tuple[int, int]) -> None:
    value = torch.arange(512.0).as_strided((8, 16), strides)
    host = torch.ops.vdnn.wait(torch.ops.vdnn.offload(value), value)
    back = torch.ops.vdnn.wait(torch.ops.vdnn.reload(host, value.device), host)
    assert host.stride() == back.stride() == value.stride()
    assert torch.equal(back, value)


def test_without_host_memory_a_value_is_copied_to_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def offload(self, *_: object) -> None:
            raise MemoryError

    value = torch.randn(64)
    transport = graph_copies.transport_for(value.device)
    monkeypatch.setattr(transport, "queue", Full())
    monkeypatch.setattr(transport, "release_sources", lambda: None)
    with pytest.warns(UserWarning, match="no more host memory can be pinned"):
        host = torch.ops.vdnn.wait(torch.ops.vdnn.offload(value), value)
    back = torch.ops.vdnn.wait(torch.ops.vdnn.reload(host, value.device), host)
    assert not graph_copies.is_on_host(host)
    assert torch.equal(back, value)


@pytest.mark.slow
@pytest.mark.full  # 19 s; in `make test` inductor compiles the model of transformers' Trainer (test_huggingface.py)
def test_inductor_offloads_on_the_simulated_device_what_was_planned_with_the_same_bits() -> None:
    model, x = made("blocks")
    plain = stepped(model, x)
    ends_bytes = sum(one.nbytes for one in model.parameters()) + 2 * x.nbytes
    options = vdnn.compile_options(ends_bytes + plain.saved_bytes * 6 // 10, SLOW_CARD)
    queue = graph_copies.transport_for(x.device).queue
    before = queue.stats.offloaded_bytes, queue.stats.reloaded_bytes
    run = stepped(model, x, options=options)
    [choice] = options["custom_partitioner_fn"].regions
    assert choice.offloaded_bytes > 0
    assert queue.stats.offloaded_bytes - before[0] == choice.offloaded_bytes
    assert queue.stats.reloaded_bytes - before[1] == choice.offloaded_bytes
    assert run.saved_bytes == choice.saved_bytes
    assert all(map(torch.equal, run.values, plain.values))
