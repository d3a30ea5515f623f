"""WORKLOADS: the workloads of the harness by name, each at its full size and at a tiny one.

The full size is for a GPU, or for virtual time without data. The tiny size has the same architecture and runs for real
on a CPU: its gradients are compared, its time means nothing. `torchvision:NAME`, `timm:NAME` and `transformers:NAME`
are made by those packages, if they are installed, from their configurations and without weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import models
from benchmarks.harness.workload_sources import SOURCES, sourced
from benchmarks.models.alexnet import narrow_alexnet
from benchmarks.models.bert import bert
from benchmarks.models.densenet import densenet
from benchmarks.models.googlenet import MODULES, googlenet
from benchmarks.models.gpt import GptShape, gpt
from benchmarks.models.inception_v4 import inception_v4
from benchmarks.models.llama import LlamaShape, llama
from benchmarks.models.lstm import lstm
from benchmarks.models.mixtral import mixture
from benchmarks.models.resnet import resnet
from benchmarks.models.resnet1202 import cifar_resnet
from benchmarks.models.unet import small_unet
from benchmarks.models.unet3d import small_unet3d
from benchmarks.models.vgg import vgg
from benchmarks.models.vit import VitShape, vit
from benchmarks.models.workload import Workload

Make = Callable[[int], Workload]


@dataclass(frozen=True, slots=True)
class BenchmarkWorkload:
    """A workload at its sizes. `blocks` names the classes that are checkpointed as one; without any, a chain is divided
    into segments, and anything else cannot be checkpointed. `tiny` is None if there is no tiny size."""

    name: str
    make: Make
    batch: int
    tiny: Make | None
    tiny_batch: int = 4
    blocks: tuple[str, ...] = ()
    autocast: bool = False

    def make_at(self, batch: int | None, *, is_tiny: bool) -> tuple[Workload, int]:
        """The workload and its batch, which is the default one if `batch` is None."""
        if not is_tiny:
            return self.make(batch or self.batch), batch or self.batch
        if self.tiny is None:
            raise ValueError(f"workload {self.name!r} has no tiny size: run it on 'virtual' or 'cuda'.")
        return self.tiny(batch or self.tiny_batch), batch or self.tiny_batch


_TINY_BERT = partial(bert, tokens=32, layers=2, width=128, vocabulary=256)
_TINY_GPT = partial(gpt, tokens=32, shape=GptShape(vocabulary=64, tokens=32, layers=2, width=64, heads=2))
_TINY_LLAMA_SHAPE = LlamaShape(vocabulary=64, layers=2, width=64, heads=4, shared_heads=2, inner=128)
_TINY_LLAMA = partial(llama, tokens=32, shape=_TINY_LLAMA_SHAPE, dtype=torch.float32)
_TINY_VIT = partial(vit, shape=VitShape(layers=2, width=64, heads=4, side=64))
_KILO = 1024
_LLAMA_TOKENS = (4, 8, 16, 32, 64)  # times 1024


def _vgg(name: str, make: Make, batch: int, added: int) -> BenchmarkWorkload:
    tiny = partial(vgg, added=added, side=32, narrowing=8)
    return BenchmarkWorkload(name, make, batch, tiny, 32)


def _resnet(name: str, make: Make, batch: int) -> BenchmarkWorkload:
    return BenchmarkWorkload(name, make, batch, partial(resnet, blocks=(1, 1), side=64), 16, ("Bottleneck",))


def _llama(name: str, make: Callable[..., Workload], kilo_tokens: int) -> BenchmarkWorkload:
    sized = partial(make, tokens=kilo_tokens * _KILO)
    return BenchmarkWorkload(f"{name}_{kilo_tokens}k", sized, 1, _TINY_LLAMA, 4, ("Layer",))


_ALL = (
    # The ten networks of the vDNN paper, which has VGG-16 at three batches.
    BenchmarkWorkload("alexnet", models.alexnet, 128, narrow_alexnet, 8),
    BenchmarkWorkload("overfeat", models.overfeat, 128, partial(models.overfeat, narrowing=16), 4),
    BenchmarkWorkload("googlenet", models.googlenet, 128, partial(googlenet, modules=MODULES[:2]), 2, ("Inception",)),
    _vgg("vgg16", models.vgg16, 128, 0),
    _vgg("vgg116", models.vgg116, 32, 1),
    _vgg("vgg216", models.vgg216, 32, 2),
    _vgg("vgg316", models.vgg316, 32, 3),
    _vgg("vgg416", models.vgg416, 32, 4),
    # Later convolutional networks.
    BenchmarkWorkload("resnet18", models.resnet18, 256, partial(models.resnet18, side=64), 8, ("BasicBlock",)),
    _resnet("resnet50", models.resnet50, 128),
    _resnet("resnet101", models.resnet101, 128),
    _resnet("resnet152", models.resnet152, 64),
    BenchmarkWorkload(
        "resnet1202", models.resnet1202, 128, partial(cifar_resnet, blocks=2), 16, ("PlainShortcutBlock",)
    ),
    BenchmarkWorkload(
        "densenet121", models.densenet121, 64, partial(densenet, blocks=(2, 2), side=64), 8, ("DenseBlock",)
    ),
    BenchmarkWorkload(
        "densenet201", models.densenet201, 64, partial(densenet, blocks=(2, 4), side=64), 8, ("DenseBlock",)
    ),
    BenchmarkWorkload("inception_v3", models.inception_v3, 64, None, 2, ("Beside",)),
    BenchmarkWorkload(
        "inception_v4", models.inception_v4, 64, partial(inception_v4, modules=(1, 1, 1), side=107), 2, ("Beside",)
    ),
    BenchmarkWorkload("unet", models.unet, 8, small_unet, 4, ("TwoConvolutions",)),
    BenchmarkWorkload("unet3d", models.unet3d, 1, small_unet3d, 4, ("TwoConvolutions3d",)),
    BenchmarkWorkload(
        "mobilenet_v2", models.mobilenet_v2, 256, partial(models.mobilenet_v2, side=64), 8, ("InvertedResidual",)
    ),
    # Networks on sequences.
    BenchmarkWorkload("lstm", models.lstm, 128, partial(lstm, tokens=8, vocabulary=64, units=32), 16),
    BenchmarkWorkload("bert_base", models.bert_base, 32, _TINY_BERT, 8, ("Layer",), autocast=True),
    BenchmarkWorkload("bert_large", models.bert_large, 16, _TINY_BERT, 8, ("Layer",), autocast=True),
    BenchmarkWorkload("gpt2", models.gpt2, 16, _TINY_GPT, 8, ("Block",), autocast=True),
    BenchmarkWorkload("gpt2_xl", models.gpt2_xl, 4, _TINY_GPT, 8, ("Block",), autocast=True),
    *(_llama("llama_1b", models.llama_1b, tokens) for tokens in _LLAMA_TOKENS),
    *(_llama("llama_8b", models.llama_8b, tokens) for tokens in _LLAMA_TOKENS),
    BenchmarkWorkload("vit_base", models.vit_base, 128, _TINY_VIT, 8, ("Layer",), autocast=True),
    BenchmarkWorkload("vit_large", models.vit_large, 64, _TINY_VIT, 8, ("Layer",), autocast=True),
    BenchmarkWorkload(
        "mixtral",
        models.mixtral,
        1,
        partial(mixture, tokens=32, shape=_TINY_LLAMA_SHAPE, dtype=torch.float32),
        4,
        ("Layer",),
    ),
)
WORKLOADS: dict[str, BenchmarkWorkload] = {one.name: one for one in _ALL}


def workload_named(name: str) -> BenchmarkWorkload:
    """The workload of that name. Raises ValueError with the known names, or why a package's model cannot be made."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    package, colon, inner = name.partition(":")
    if colon and package in SOURCES:
        made = sourced(package, inner)
        return BenchmarkWorkload(name, made.make, made.batch, made.tiny, blocks=made.blocks, autocast=made.autocast)
    raise ValueError(f"expected a workload among {', '.join(workload_names())}, got {name!r}.")


def workload_names() -> list[str]:
    """The names of this tree's workloads and of those from installed packages."""
    sources = (source for source in SOURCES.values() if source.why_not() is None)
    return [*WORKLOADS, *(name for source in sources for name in source.names)]
