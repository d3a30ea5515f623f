"""Whole models, in single precision and under autocast: every recipe gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from benchmarks.models.densenet import DenseBlock
from benchmarks.models.resnet import resnet
from tests.runtime.recompute.saving import Saving
from tests.runtime.rigs.architectures import NAMES, build

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

Step = Callable[[], torch.Tensor]


def _resnet() -> tuple[nn.Module, Step]:
    work = resnet(2, (1, 2), 32)
    return work.model, lambda: work.loss(work.model(*work.inputs))


def _densenet() -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), DenseBlock(8, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten())
    x = torch.randn(2, 3, 8, 8)
    return model, lambda: model(x).square().mean()


def _vgg() -> tuple[nn.Module, Step]:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 16)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 16, 32), nn.ReLU(inplace=True), nn.Dropout(0.5))
    x = torch.randn(2, 3, 16, 16)
    return model, lambda: model(x).square().mean()


NETWORKS = {"resnet": _resnet, "densenet": _densenet, "vgg": _vgg}


@pytest.mark.parametrize("expensive", [False, True], ids=["cheap", "expensive"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_convolutions(name: str, layout: torch.memory_format, autocast: bool, expensive: bool) -> None:
    torch.manual_seed(3)
    model, forward = NETWORKS[name]()
    model.to(memory_format=layout)
    saving = _stepped(forward, autocast=autocast, expensive=expensive)
    print(f"{name}: {len(saving.recipes)} of {saving.saves} saves recomputed: {dict(saving.names)}")
    assert saving.failures == []
    assert len(saving.recipes) >= 3
    assert saving.recomputed_at_use


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_of_transformers(name: str, autocast: bool) -> None:
    torch.manual_seed(3)
    model, inputs = build(name)
    try:
        saving = _stepped(lambda: model(**inputs).loss, autocast=autocast, expensive=True)
    except (RuntimeError, NotImplementedError) as error:
        if not autocast:
            raise
        pytest.skip(f"not under autocast: {error}")
    print(f"{name}: {len(saving.recipes)} of {saving.saves} saves recomputed: {dict(saving.names)}")
    assert saving.failures == []
    assert len(saving.recipes) >= 3
    assert saving.recomputed_at_use


def _stepped(forward: Step, *, autocast: bool, expensive: bool) -> Saving:
    with Saving(expensive=expensive) as saving:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = forward()
        loss.backward()
    return saving
