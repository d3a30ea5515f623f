"""The architectures are the published ones: parameter counts, output shapes, and a step at the published batch.

All tests run under FakeTensorMode, so that a batch of 4096 images needs no memory; a few small ones also run for real.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import models
from benchmarks.models import Workload
from benchmarks.models.gpt import GptShape, gpt
from benchmarks.models.llama import LlamaShape
from benchmarks.models.mixtral import Experts

pytestmark = pytest.mark.slow


class Published(NamedTuple):
    """Published facts of a network. `count_source` and `batch_source` name the sources."""

    make: Callable[[int], Workload]
    parameter_count: int
    count_source: str
    batch: int
    batch_source: str
    output_shape: tuple[int, ...]  # of one sample


TORCHVISION = "torchvision's model table"
VDNN = "vDNN, section IV"
PUBLISHED = {
    "alexnet": Published(models.alexnet, 61_100_840, TORCHVISION, 128, VDNN, (1000,)),
    "alexnet_227": Published(
        models.alexnet_227, 62_378_344, "the usual count of AlexNet without groups", 128, VDNN, (1000,)
    ),
    "overfeat": Published(
        models.overfeat, 145_920_872, "OverFeat paper, table 4: 145 million for the fast model", 128, VDNN, (1000,)
    ),
    "googlenet": Published(models.googlenet, 6_998_552, "BVLC GoogLeNet without auxiliary heads", 128, VDNN, (1000,)),
    "vgg16": Published(models.vgg16, 138_357_544, TORCHVISION, 256, VDNN, (1000,)),
    # Each 100 layers: 20 convolutions of n channels, 9 n^2 weights and n biases, in groups of 64, 128, 256, 512, 512.
    "vgg116": Published(models.vgg116, 138_357_544 + 109_884_160, "VGG-16 and 100 layers", 32, VDNN, (1000,)),
    "vgg216": Published(models.vgg216, 138_357_544 + 2 * 109_884_160, "VGG-16 and 200 layers", 32, VDNN, (1000,)),
    "vgg316": Published(models.vgg316, 138_357_544 + 3 * 109_884_160, "VGG-16 and 300 layers", 32, VDNN, (1000,)),
    "vgg416": Published(models.vgg416, 138_357_544 + 4 * 109_884_160, "VGG-16 and 400 layers", 32, VDNN, (1000,)),
    "resnet50": Published(models.resnet50, 25_557_032, TORCHVISION, 256, "ResNet paper, section 3.4", (1000,)),
    "resnet152": Published(models.resnet152, 60_192_808, TORCHVISION, 256, "ResNet paper, section 3.4", (1000,)),
    "densenet121": Published(models.densenet121, 7_978_856, TORCHVISION, 256, "DenseNet paper, section 4.2", (1000,)),
    "unet": Published(
        models.unet, 31_030_658, "zhixuhao/unet, 31,031,685, less its further head", 1, "U-Net paper", (2, 388, 388)
    ),
    "bert_large": Published(
        models.bert_large, 335_174_458, "transformers' BertForMaskedLM", 256, "BERT paper, A.2", (512, 30522)
    ),
    "bert_base": Published(
        models.bert_base, 109_514_298, "transformers' BertForMaskedLM", 256, "BERT paper, A.2", (512, 30522)
    ),
    "gpt2_xl": Published(
        models.gpt2_xl, 1_557_611_200, "transformers' gpt2-xl", 512, "GPT-2 paper, section 2.3", (1024, 50257)
    ),
    "resnet18": Published(models.resnet18, 11_689_512, TORCHVISION, 256, "ResNet paper, section 3.4", (1000,)),
    "resnet101": Published(models.resnet101, 44_549_160, TORCHVISION, 256, "ResNet paper, section 3.4", (1000,)),
    "resnet1202": Published(
        models.resnet1202, 19_421_274, "ResNet paper, table 6: 19.4 million", 128, "ResNet paper, section 4.2", (10,)
    ),
    "densenet201": Published(models.densenet201, 20_013_928, TORCHVISION, 256, "DenseNet paper, section 4.2", (1000,)),
    "inception_v4": Published(
        models.inception_v4, 42_679_816, "timm's inception_v4", 32, "Inception-v4 paper, section 4", (1000,)
    ),
    "mobilenet_v2": Published(models.mobilenet_v2, 3_504_872, TORCHVISION, 96, "MobileNetV2 paper, 6.1", (1000,)),
    "unet3d": Published(
        models.unet3d, 19_069_955, "3D U-Net paper, section 2", 1, "volumes come one by one", (3, 44, 44, 28)
    ),
    # The paper says 66 million, with one bias where torch has two: here there are 2 layers x 4 gates x 1500 units more.
    "lstm": Published(models.lstm, 66_022_000 + 12_000, "Zaremba and others", 20, "section 4.1", (35, 10_000)),
    "gpt2": Published(models.gpt2, 124_439_808, "transformers' gpt2", 512, "GPT-2 paper, section 2.3", (1024, 50257)),
    "llama_1b": Published(
        models.llama_1b, 1_235_814_400, "transformers' Llama 3.2 1B", 1, "one sequence", (8192, 128256)
    ),
    # The full model has 46,702,792,704 for 32 layers of 1,451,270,144; the slice has one layer.
    "mixtral": Published(
        models.mixtral,
        46_702_792_704 - 31 * 1_451_270_144,
        "transformers' Mixtral 8x7B, less 31 layers",
        1,
        "one sequence",
        (4096, 32000),
    ),
    "vit_base": Published(models.vit_base, 86_567_656, TORCHVISION, 4096, "ViT paper, section 4.1", (1000,)),
    "vit_large": Published(models.vit_large, 304_326_632, TORCHVISION, 4096, "ViT paper, section 4.1", (1000,)),
    # The full model has 8,030,261,248 for 32 layers of 218,112,000; the slice has four layers.
    "llama_8b": Published(
        models.llama_8b,
        8_030_261_248 - 28 * 218_112_000,
        "transformers' Llama 3 8B, less 28 layers",
        1,
        "one sequence of a batch of 4 million tokens",
        (8192, 128256),
    ),
}


def small_gpt(batch: int = 2) -> Workload:
    return gpt(batch, 8, GptShape(vocabulary=500, tokens=8, layers=2, width=64, heads=4))


def gradients_missing(model: nn.Module) -> list[str]:
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or parameter.grad.shape != parameter.shape
    ]


@pytest.mark.drawn(of=4)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_network_is_the_published_one_and_steps_at_its_published_batch(name: str) -> None:
    published = PUBLISHED[name]
    with FakeTensorMode():
        workload = published.make(published.batch)
        assert workload.parameter_count == published.parameter_count
        output = workload.model(*workload.inputs)
        assert output.shape == (published.batch, *published.output_shape)
        loss = workload.loss(output)
        assert loss.shape == ()
        loss.backward()
        assert gradients_missing(workload.model) == []


def test_inception_v3_has_two_classifiers_and_both_learn() -> None:
    with FakeTensorMode():
        workload = models.inception_v3(32)  # the paper trains with a batch of 32 on each of 50 machines
        assert workload.parameter_count == 27_161_264  # torchvision's model table, with the auxiliary classifier
        assert [tuple(output.shape) for output in workload.model(*workload.inputs)] == [(32, 1000), (32, 1000)]
        workload.step()
        assert gradients_missing(workload.model) == []


def test_the_whole_of_llama_3_8b_has_its_published_count() -> None:
    with FakeTensorMode():
        assert models.llama_8b(1, layers=32).parameter_count == 8_030_261_248


def test_the_whole_of_mixtral_8x7b_has_its_published_count() -> None:
    with FakeTensorMode():
        assert models.mixtral(1, layers=32).parameter_count == 46_702_792_704


def test_every_expert_gets_no_more_tokens_than_it_has_room_for() -> None:
    """All tokens are equal here, so all choose the same two experts, which take tokens up to their capacity."""
    torch.manual_seed(0)
    shape = LlamaShape(width=16, inner=32, heads=2, shared_heads=2)
    experts = Experts(shape, torch.float32)
    with torch.no_grad():
        made = experts(torch.randn(16).expand(1, 32, 16))[0]
    room = int(1.25 * 2 * 32 / 8)
    assert [bool(row.any()) for row in made] == [True] * room + [False] * (32 - room)
    assert torch.allclose(made[:room], made[0].expand(room, -1))


def test_every_network_of_the_package_is_checked_here() -> None:
    made = {name for name in models.__all__ if name.islower()}
    assert made == {*PUBLISHED, "inception_v3"}


@pytest.mark.parametrize("name", ["alexnet", "overfeat", "googlenet", "vgg16", "resnet50", "densenet121", "unet"])
def test_the_relus_are_in_place(name: str) -> None:
    with FakeTensorMode():
        model = PUBLISHED[name].make(1).model
    relus = [module for module in model.modules() if isinstance(module, nn.ReLU)]
    assert relus
    assert all(relu.inplace for relu in relus)


@pytest.mark.parametrize(
    "make",
    [
        lambda: models.googlenet(1),
        lambda: models.bert_large(2, tokens=8, layers=1),
        small_gpt,
        pytest.param(lambda: models.gpt2_xl(2, tokens=8, layers=1), marks=pytest.mark.full),
        lambda: models.vit_large(1, layers=1),
    ],
    ids=["googlenet", "bert", "gpt", "gpt2_xl", "vit"],
)
def test_a_small_one_steps_for_real(make: Callable[[], Workload]) -> None:
    torch.manual_seed(0)
    workload = make()
    loss = workload.loss(workload.model(*workload.inputs))
    loss.backward()
    assert math.isfinite(loss.item())
    assert gradients_missing(workload.model) == []


def test_a_language_model_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    workload = small_gpt(1)
    (tokens,) = workload.inputs
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 500
    with torch.no_grad():
        before, after = workload.model(tokens), workload.model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])
