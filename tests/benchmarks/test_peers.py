"""Peers by name, the modules that checkpointing wraps, and the tensors that compiled offloading tags."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import models
from benchmarks.harness.places import CudaPlace, MachinePlace
from benchmarks.peers import GROUPS, PEERS, peers_named
from benchmarks.peers.checkpoint import checkpointed, segments_of
from benchmarks.peers.compiled_offload import MIN_BYTES, tag_large_results
from benchmarks.peers.package_hooks import TRL
from benchmarks.peers.peer import Trial
from tests.benchmarks.test_places import MadeUpCuda


def test_groups_are_taken_apart_in_the_order_of_all() -> None:
    assert peers_named(["vdnn-auto", "vdnn-2016", "plain", "vdnn-all"]) == [
        *("plain", "vdnn-all", "vdnn-conv", "vdnn-dyn", "vdnn-auto")
    ]
    assert peers_named(["all"]) == list(PEERS) == list(GROUPS["all"])


def test_an_unknown_peer_is_told_what_there_is() -> None:
    with pytest.raises(ValueError, match="expected a peer among plain, checkpoint, .*, all, got 'chekpoint'"):
        peers_named(["plain", "chekpoint"])


@pytest.mark.parametrize("make", [models.vgg16, models.alexnet, models.overfeat, models.vgg116])
def test_no_segment_of_a_chain_begins_with_what_writes_in_place(make: Callable[[int], Any]) -> None:
    """An in-place ReLU at the start would overwrite the tensor that the segment is recomputed from."""
    with FakeTensorMode():
        model = make(1).model
    segments = segments_of(model)
    assert [layer for segment in segments for layer in segment] == list(model)
    assert all(isinstance(segment[0], (nn.Conv2d, nn.Linear)) for segment in segments)
    assert 3 <= len(segments) <= 2 * len(model) ** 0.5


def test_blocks_are_run_by_what_recomputes_them_and_are_themselves_again_afterwards() -> None:
    class Block(nn.Linear):
        """A block that contains another block."""

        def __init__(self) -> None:
            super().__init__(2, 2)
            self.inner = nn.ModuleList([nn.Linear(2, 2)])

    model = nn.Sequential(Block(), nn.ReLU(), Block())
    called = []

    def recomputed(forward: Callable[..., Any], *inputs: Any) -> Any:
        called.append(forward)
        return forward(*inputs)

    with checkpointed(model, ("Block", "Linear"), recomputed) as count:
        model(torch.ones(1, 2))
    assert count == 2
    assert len(called) == 2, "the outermost only"
    model(torch.ones(1, 2))
    assert len(called) == 2


def test_only_large_floating_results_are_tagged_for_the_compiled_offloading() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    rows = MIN_BYTES // 4
    large, small, whole = (graph.call_function(torch.relu, (x,)) for _ in range(3))
    x.meta["val"] = large.meta["val"] = torch.empty(rows, device="meta")
    small.meta["val"] = torch.empty(rows - 1, device="meta")
    whole.meta["val"] = torch.empty(rows, dtype=torch.int64, device="meta")
    tag_large_results(graph)
    assert [bool(node.meta.get("should_offload")) for node in graph.nodes] == [False, True, False, False]


def test_a_packages_hooks_are_around_the_forward_pass_and_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    class OffloadActivations:
        """Stands in for the class of TRL."""

        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *exception: object) -> None:
            entered.append("out")

    module = types.ModuleType("trl.models.activation_offloading")
    module.OffloadActivations = OffloadActivations  # type: ignore[attr-defined]
    for name in ("trl", "trl.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert TRL.refusal(MachinePlace("h100", has_data=True), ()) == "it offloads no tensors that are on the CPU"
    place = CudaPlace(MadeUpCuda())
    assert TRL.refusal(place, ()) is None
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: entered.append("forward"))
    workload = models.Workload(model, (torch.ones(1, 2),), lambda out: out.sum())
    with TRL.open(Trial(place, workload, ())) as opened:
        assert opened.model is not None
        opened.model(*workload.inputs).sum().backward()
    assert entered == ["in", "forward", "out"]
