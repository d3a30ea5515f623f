"""A compiled region as a recorded step: what its kernels take, and what is held when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from vdnn.hardware import HardwareProfile, load_profile
from vdnn.runtime.machine.graph_cost import GraphCost
from vdnn.runtime.machine.graph_step import graph_step
from vdnn.runtime.torch_internals import joint_graph
from vdnn.runtime.torch_internals.joint_graph import SavedStorage
from vdnn.step.recording import PointKind

SIDE = 256
BYTES = SIDE * SIDE * 4


@pytest.fixture
def card() -> HardwareProfile:
    return load_profile("h100")


def traced(function: Callable[..., Any], inputs: int) -> fx.Graph:
    with FakeTensorMode():
        graph = make_fx(function)(*(torch.empty(SIDE, SIDE) for _ in range(inputs))).graph
    assert isinstance(graph, fx.Graph)
    return graph


def times_of(graph: fx.Graph, card: HardwareProfile) -> dict[str, float]:
    cost = GraphCost(card, joint_graph.is_fusible, joint_graph.hinted)
    return {node.name: ns for node, ns in cost.node_ns(graph, joint_graph.is_view).items()}


def moved_ns(tensors: int, card: HardwareProfile) -> float:
    """The time of one kernel that reads and writes `tensors` in all."""
    rate = card.memory_bytes_per_s * card.bandwidth_efficiency
    return tensors * BYTES / rate * 1e9 + card.kernel_launch_ns


def test_a_chain_of_pointwise_operations_costs_what_it_reads_and_writes(card: HardwareProfile) -> None:
    times = times_of(traced(lambda x: (x.t().relu() * 2).sigmoid(), 1), card)
    assert times == {"sigmoid": pytest.approx(moved_ns(2, card))}


def test_a_product_between_two_pointwise_operations_divides_them(card: HardwareProfile) -> None:
    def residual(x: Tensor, weight: Tensor) -> Tensor:
        ahead = x.relu()
        return ahead + ahead @ weight

    times = times_of(traced(residual, 2), card)
    assert times.keys() == {"relu", "mm", "add"}
    assert times["relu"] == pytest.approx(moved_ns(2, card))
    assert times["add"] == pytest.approx(moved_ns(3, card))


def test_the_bytes_of_a_saved_value_count_from_its_making_to_its_last_use() -> None:
    forward = traced(lambda x: (x.relu(), x.sigmoid()), 1)
    backward = traced(lambda relu, sigmoid: (sigmoid.cos() + relu.sin(),), 2)
    for node, name in zip(backward.find_nodes(op="placeholder"), ("relu", "sigmoid"), strict=True):
        node.name = name
    saved = (SavedStorage(("relu",), BYTES, True), SavedStorage(("sigmoid",), 2 * BYTES, False))
    step = graph_step(forward, backward, saved, 100, {}, joint_graph.is_view)
    recording = step.recording
    # sigmoid cannot leave: it has no point of its own, and is held from its making until relu is used.
    assert [point.kind for point in recording.points] == [
        PointKind.SAVE,
        PointKind.USE,  # the end of forward
        PointKind.USE,
        PointKind.END,
    ]
    assert [point.allocated_bytes for point in recording.points] == [100 + BYTES, 100 + 3 * BYTES, 100 + BYTES, 100]
    assert step.boundary == 1
    [lifetime] = recording.lifetimes
    assert (lifetime.saves, lifetime.uses, lifetime.end_point) == ((0,), (2,), 3)
