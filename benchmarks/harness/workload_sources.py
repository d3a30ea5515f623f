"""Models of other packages, made from their configurations without weights, and so without a network.

A package is imported only when one of its models is named; if that fails, the error gives the reason. Images are
224 x 224 with ImageNet's classes, unless the model needs others; sequences have the model's usual length.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.workload import IMAGENET_CLASSES, CrossEntropy, Workload, images

_SIDES = {"inception_v3": 299, "inception_v4": 299}
_TORCHVISION = ("resnet18", "resnet50", "resnet101", "resnet152", "densenet121", "vgg16", "mobilenet_v2", "vit_b_16")
_TIMM = ("resnet50", "inception_v4", "convnext_base", "vit_large_patch16_224", "swin_base_patch4_window7_224")
# Names of the classes of blocks, in any of the packages.
_BLOCKS = (
    *("Bottleneck", "BasicBlock", "_DenseBlock", "InvertedResidual", "EncoderBlock", "Block", "SwinTransformerBlock"),
    *("ConvNeXtBlock", "GPT2Block", "BertLayer", "LlamaDecoderLayer", "ViTLayer"),
)


@dataclass(frozen=True, slots=True)
class Sourced:
    """A model of a package. `tiny` is None if it has only one size."""

    make: Callable[[int], Workload]
    batch: int
    tiny: Callable[[int], Workload] | None = None
    autocast: bool = True
    blocks: tuple[str, ...] = _BLOCKS


@dataclass(frozen=True, slots=True)
class Source:
    """A package. `names` has some of its models; `find` finds any model that it has."""

    package: str
    names: tuple[str, ...]
    find: Callable[[str], Sourced]

    def why_not(self) -> str | None:
        try:
            importlib.import_module(self.package)
        except Exception as error:  # another package may raise anything when it is imported
            return f"{self.package} cannot be imported ({type(error).__name__}: {error})"
        return None


def sourced(package: str, name: str) -> Sourced:
    source = SOURCES[package]
    reason = source.why_not()
    if reason is not None:
        raise ValueError(f"workload {package}:{name}: {reason}. Install it, or use a workload of benchmarks.models.")
    return source.find(name)


def _torchvision(name: str) -> Sourced:
    models: Any = importlib.import_module("torchvision.models")
    if name not in models.list_models():
        raise ValueError(f"expected a model of torchvision among {', '.join(models.list_models())}, got {name!r}.")
    return Sourced(lambda batch: _on_images(models.get_model(name, weights=None), name, batch), 64)


def _timm(name: str) -> Sourced:
    timm: Any = importlib.import_module("timm")
    if name not in timm.list_models():
        raise ValueError(f"expected a model of timm, such as {', '.join(_TIMM)}, got {name!r}.")
    return Sourced(lambda batch: _on_images(timm.create_model(name, pretrained=False), name, batch), 64)


def _on_images(model: nn.Module, name: str, batch: int) -> Workload:
    return Workload(model, (images(batch, _SIDES.get(name, 224)),), _OfLogits(IMAGENET_CLASSES, batch))


class _OfLogits(CrossEntropy):
    """The cross entropy of a package's output: a tensor, a tuple with the logits first, or an object with `logits`."""

    def __call__(self, output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            output = output[0] if isinstance(output, tuple) else output.logits
        return super().__call__(output)


@dataclass(frozen=True, slots=True)
class _Transformer:
    """Class and configuration of a model; `small` changes the configuration to a tiny one."""

    model: str
    config: str
    settings: dict[str, Any]
    small: dict[str, Any]
    batch: int
    tokens: int | None = None  # None if the inputs are images


_SMALL_GPT: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 64}
_SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
_LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "use_cache": False,
}
_TRANSFORMERS = {
    "gpt2": _Transformer("GPT2LMHeadModel", "GPT2Config", {"use_cache": False}, _SMALL_GPT, 16, 1024),
    "bert-base": _Transformer("BertForMaskedLM", "BertConfig", {}, {**_SMALL, "vocab_size": 64}, 32, 512),
    "llama-1b": _Transformer(
        "LlamaForCausalLM", "LlamaConfig", _LLAMA_1B, {**_SMALL, "vocab_size": 64, "num_key_value_heads": 1}, 1, 8192
    ),
    "vit-base": _Transformer(
        "ViTForImageClassification", "ViTConfig", {"num_labels": IMAGENET_CLASSES}, {**_SMALL, "image_size": 64}, 64
    ),
}
_TINY_TOKENS = 32


def _transformers(name: str) -> Sourced:
    if name not in _TRANSFORMERS:
        raise ValueError(f"expected a model of transformers among {', '.join(_TRANSFORMERS)}, got {name!r}.")
    kind = _TRANSFORMERS[name]
    return Sourced(
        lambda batch: _transformer(kind, batch, is_small=False),
        kind.batch,
        lambda batch: _transformer(kind, batch, is_small=True),
    )


def _transformer(kind: _Transformer, batch: int, *, is_small: bool) -> Workload:
    package: Any = importlib.import_module("transformers")
    config = getattr(package, kind.config)(**{**kind.settings, **(kind.small if is_small else {})})
    model = getattr(package, kind.model)(config).train()
    if kind.tokens is None:
        return Workload(model, (images(batch, config.image_size),), _OfLogits(IMAGENET_CLASSES, batch))
    tokens = _TINY_TOKENS if is_small else kind.tokens
    loss = _OfLogits(config.vocab_size, batch, tokens, last=True)
    return Workload(model, (torch.randint(config.vocab_size, (batch, tokens)),), loss)


SOURCES = {
    "torchvision": Source("torchvision", tuple(f"torchvision:{name}" for name in _TORCHVISION), _torchvision),
    "timm": Source("timm", tuple(f"timm:{name}" for name in _TIMM), _timm),
    "transformers": Source("transformers", tuple(f"transformers:{name}" for name in _TRANSFORMERS), _transformers),
}
