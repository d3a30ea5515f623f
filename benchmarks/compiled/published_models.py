"""Small models of transformers beside those of the harness: the library's code, with configurations of one layer."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

from benchmarks.models.workload import Workload

_TOKENS, _WORDS, _BATCH, _SIDE = 16, 64, 2, 32
_SMALL: dict[str, Any] = {
    "vocab_size": _WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 1, "use_cache": False, "pad_token_id": 0}


class _Kind(NamedTuple):
    model: str
    config: str
    settings: dict[str, Any]
    has_images: bool = False


MODELS = {
    "mistral": _Kind("MistralForCausalLM", "MistralConfig", _GROUPED),
    "qwen2": _Kind("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "phi": _Kind("PhiForCausalLM", "PhiConfig", {**_SMALL, "use_cache": False}),
    "gemma": _Kind("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 16}),
    "roberta": _Kind("RobertaForMaskedLM", "RobertaConfig", _SMALL),
    "electra": _Kind("ElectraForMaskedLM", "ElectraConfig", {**_SMALL, "embedding_size": 32}),
    "albert": _Kind("AlbertForMaskedLM", "AlbertConfig", {**_SMALL, "embedding_size": 32}),
    "opt": _Kind(
        "OPTForCausalLM", "OPTConfig", {**_SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "use_cache": False}
    ),
    "gpt-neox": _Kind("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_SMALL, "use_cache": False}),
    "distilbert": _Kind(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": _WORDS, "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64},
    ),
    "convnext": _Kind(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "num_labels": _WORDS},
        has_images=True,
    ),
}


class OfLogits:
    """The cross entropy of a model's logits with fixed random classes."""

    def __init__(self, *shape: int) -> None:
        self.targets = torch.randint(_WORDS, shape)

    def __call__(self, output: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output.logits.flatten(0, -2), self.targets.flatten())


def made(name: str) -> Workload:
    """The model, its inputs and its loss."""
    kind, package = MODELS[name], importlib.import_module("transformers")
    model = getattr(package, kind.model)(getattr(package, kind.config)(**kind.settings)).train()
    if kind.has_images:
        return Workload(model, (torch.randn(_BATCH, 3, _SIDE, _SIDE),), OfLogits(_BATCH))
    return Workload(model, (torch.randint(_WORDS, (_BATCH, _TOKENS)),), OfLogits(_BATCH, _TOKENS))
