"""The networks of published speeds that benchmarks/models lacks: as their benchmarks wrote them.

convnet-benchmarks has AlexNet of the One Weird Trick paper and VGG's model A; SQuAD's head on BERT has two outputs for
each token; BERT's pre-training computes logits for the masked tokens only; timm's ViTs of 2022 write attention out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from benchmarks import models
from benchmarks.models.bert import BASE_LAYERS, BASE_WIDTH, LAYERS, VOCABULARY, WIDTH, Bert, bert
from benchmarks.models.masked_bert import MaskedBert
from benchmarks.models.resnet18 import resnet18, resnet34
from benchmarks.models.vit import BASE, LARGE, Layer, VitShape, vit
from benchmarks.models.workload import IMAGENET_CLASSES, CrossEntropy, Workload, image_workload
from benchmarks.speeds.bert_programs import add_mask

SQUAD_TOKENS = 384
_MODEL_A = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)  # 0 is a pooling


def alexnet_owt(batch: int) -> Workload:
    """AlexNet of the One Weird Trick paper on 224 x 224 images, without dropout."""
    convolutions = (
        (3, 64, 11, 4, 2),
        (64, 192, 5, 1, 2),
        (192, 384, 3, 1, 1),
        (384, 256, 3, 1, 1),
        (256, 256, 3, 1, 1),
    )
    layers: list[nn.Module] = []
    for index, (inputs, outputs, kernel, stride, padding) in enumerate(convolutions):
        layers += [nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU(inplace=True)]
        if index in (0, 1, 4):
            layers.append(nn.MaxPool2d(3, 2))
    return image_workload(nn.Sequential(*layers, *_classifier(256 * 6 * 6)), batch, 224)


def vgg_a(batch: int) -> Workload:
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in _MODEL_A:
        if outputs:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = outputs
        else:
            layers.append(nn.MaxPool2d(2))
    return image_workload(nn.Sequential(*layers, *_classifier(512 * 7 * 7)), batch, 224)


def _classifier(inputs: int) -> list[nn.Module]:
    hidden = 4096
    return [
        nn.Flatten(),
        nn.Linear(inputs, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, IMAGENET_CLASSES),
    ]


class _SpanBert(nn.Module):
    """BERT that scores each token as the begin and as the end of an answer."""

    def __init__(self, inner: Bert, width: int) -> None:
        super().__init__()
        self.inner = inner
        inner.head = nn.Sequential()
        del inner.bias
        self.spans = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        inner = self.inner
        x = inner.words(tokens) + inner.places.weight[: tokens.shape[1]] + inner.segments.weight[0]
        scores: Tensor = self.spans(inner.layers(inner.dropout(inner.norm(x))))
        return scores.transpose(1, 2).flatten(0, 1)


def bert_squad(batch: int, layers: int, width: int) -> Workload:
    inputs = bert(batch, SQUAD_TOKENS, 0, width).inputs
    model = _SpanBert(Bert(layers, width), width)
    add_mask(model, batch, SQUAD_TOKENS)
    return Workload(model, inputs, CrossEntropy(SQUAD_TOKENS, 2 * batch))


def vit_written_out(batch: int, shape: VitShape) -> Workload:
    """A ViT without fused attention, which torch did not have when its speed was published."""
    workload = vit(batch, shape)
    for layer in workload.model.modules():
        if isinstance(layer, Layer):
            layer.attend = _attend
    return workload


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    # Under autocast the softmax is in float32, as in the published programs; torch's own math attention is not.
    scores: Tensor = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value


def bert_large_pretraining(batch: int, tokens: int) -> Workload:
    inputs = bert(batch, tokens, 0, WIDTH).inputs
    model = MaskedBert(Bert(LAYERS, WIDTH), batch * tokens)
    add_mask(model, batch, tokens)
    return Workload(model, inputs, CrossEntropy(VOCABULARY, len(model.get_buffer("masked"))))


NETWORKS: dict[str, Callable[[int], Workload]] = {
    "AlexNet": alexnet_owt,
    "OverFeat": models.overfeat,
    "VGG model A": vgg_a,
    "GoogLeNet": models.googlenet,
    "ResNet-18": resnet18,
    "ResNet-34": resnet34,
    "ResNet-50": models.resnet50,
    "ResNet-101": models.resnet101,
    "ResNet-152": models.resnet152,
    "DenseNet-121": models.densenet121,
    "DenseNet-201": models.densenet201,
    "Inception v3": models.inception_v3,
    "Inception v4": models.inception_v4,
    "VGG-16": models.vgg16,
    "MobileNetV2": models.mobilenet_v2,
    "ViT-Ti": partial(vit_written_out, shape=VitShape(layers=12, width=192, heads=3)),
    "ViT-S": partial(vit_written_out, shape=VitShape(layers=12, width=384, heads=6)),
    "ViT-B": partial(vit_written_out, shape=BASE),
    "ViT-L": partial(vit_written_out, shape=LARGE),
    "BERT-base, SQuAD": partial(bert_squad, layers=BASE_LAYERS, width=BASE_WIDTH),
    "BERT-large, SQuAD": partial(bert_squad, layers=LAYERS, width=WIDTH),
    "BERT-large, 128 tokens": partial(bert_large_pretraining, tokens=128),
    "BERT-large, 512 tokens": partial(bert_large_pretraining, tokens=512),
}
