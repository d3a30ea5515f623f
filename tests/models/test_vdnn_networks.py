"""The ten networks of the vDNN paper, and the maps between their layers, compared with a table made by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.models import VDNN_NETWORKS, Workload, alexnet_227, googlenet, overfeat, vgg16
from benchmarks.models.googlenet import Inception

MIB = 2**20
# The input of each convolution, pooling and fully connected layer, in MiB.
VGG16_AT_64 = (
    *(36.75, 784, 784),
    *(196, 392, 392),
    *(98, 196, 196, 196),
    *(49, 98, 98, 98),
    *(24.5, 24.5, 24.5, 24.5),
    *(6.125, 1, 1),
)
ALEXNET_227_AT_128 = (75.48, 141.80, 34.17, 91.12, 21.12, 31.69, 31.69, 21.12, 4.5, 2, 2)
OVERFEAT_AT_128 = (78.17, 147, 36.75, 72, 18, 36, 72, 72, 18, 1.5, 2)
GOOGLENET_MODULES_AT_128 = (98, 183.8, 49, 49, 49, 50.5, 79.6, 19.9, 24.5)


def bytes_read(workload: Workload, kinds: tuple[type[nn.Module], ...]) -> list[int]:
    """Returns the input bytes of each layer of those kinds, in the order of the forward pass."""
    found: list[int] = []

    def note(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        found.append(inputs[0].numel() * inputs[0].itemsize)

    for module in workload.model.modules():
        if isinstance(module, kinds):
            module.register_forward_pre_hook(note)
    workload.model(*workload.inputs)
    return found


@pytest.mark.parametrize(
    ("make", "batch", "expected"),
    [(vgg16, 64, VGG16_AT_64), (alexnet_227, 128, ALEXNET_227_AT_128), (overfeat, 128, OVERFEAT_AT_128)],
    ids=["vgg16", "alexnet_227", "overfeat"],
)
def test_the_maps_have_the_sizes_of_the_table(
    make: Callable[[int], Workload], batch: int, expected: tuple[float, ...]
) -> None:
    with FakeTensorMode():
        found = bytes_read(make(batch), (nn.Conv2d, nn.MaxPool2d, nn.Linear))
    assert [size / MIB for size in found] == pytest.approx(expected, abs=0.005)


def test_the_modules_of_googlenet_make_maps_of_the_sizes_of_the_table() -> None:
    made: list[float] = []
    with FakeTensorMode():
        workload = googlenet(128)
        for module in workload.model.modules():
            if isinstance(module, Inception):
                module.register_forward_hook(lambda _, inputs, out: made.append(out.numel() * out.itemsize / MIB))
        workload.model(*workload.inputs)
    assert made == pytest.approx(GOOGLENET_MODULES_AT_128, abs=0.06)


def test_there_are_ten_with_the_batches_of_the_paper() -> None:
    assert [network.title for network in VDNN_NETWORKS] == [
        "AlexNet (128)",
        "OverFeat (128)",
        "GoogLeNet (128)",
        "VGG-16 (64)",
        "VGG-16 (128)",
        "VGG-16 (256)",
        "VGG-116 (32)",
        "VGG-216 (32)",
        "VGG-316 (32)",
        "VGG-416 (32)",
    ]
    # According to the paper, six of the ten do not train on 12 GB without vDNN.
    assert sum(not network.trains_without for network in VDNN_NETWORKS) == 6


def test_a_network_is_made_at_its_batch() -> None:
    with FakeTensorMode():
        for network in VDNN_NETWORKS[:4]:
            assert network.workload().inputs[0].shape[0] == network.batch


@pytest.mark.slow
def test_the_deep_ones_have_as_many_layers_as_their_names_say() -> None:
    for network in VDNN_NETWORKS:
        if network.name.startswith("VGG-"):
            with FakeTensorMode():
                model = network.workload().model
            weights = [module for module in model if isinstance(module, (nn.Conv2d, nn.Linear))]
            assert len(weights) == int(network.name.removeprefix("VGG-"))
