"""A decoder of transformers gets no mask in a rehearsal where it gets none on a GPU: nothing padded, nothing packed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.attention_masks import MaskQuestions
from vdnn.runtime.rehearsal.stage import stage

TOKENS, WORDS = 96, 128
WINDOW = 32

INPUTS: dict[str, Any] = {
    "no mask": lambda tokens: {},
    "a mask of ones": lambda tokens: {"attention_mask": torch.ones_like(tokens)},
    "positions": lambda tokens: {"position_ids": torch.arange(TOKENS).expand(2, TOKENS)},
    "a mask that depends on data": lambda tokens: {
        "attention_mask": (torch.randn(2, 8) @ torch.randn(8, TOKENS)).long()
    },
    "padding": lambda tokens: {"attention_mask": torch.ones_like(tokens).tril()},
    "two sequences in a row": lambda tokens: {"position_ids": (torch.arange(TOKENS) % (TOKENS // 2)).expand(2, TOKENS)},
}
MASKED = {"padding", "two sequences in a row", "a mask that depends on data"}


def decoder(kind: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes, vocab_size=WORDS, use_cache=False, **options)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)


def masks_of(kind: str, name: str, **options: Any) -> tuple[list[Any], int]:
    """The masks that attentions of a step get, and the stand-ins that it asked for."""
    with VirtualMachine("h100") as machine, stage(machine) as values:
        model = decoder(kind, **options)
        found: list[Any] = []
        attention = model.model.layers[0].self_attn
        attention.register_forward_pre_hook(
            lambda module, args, kwargs: found.append(kwargs.get("attention_mask")), with_kwargs=True
        )
        tokens = torch.randint(WORDS, (2, TOKENS))
        model(input_ids=tokens, labels=tokens, **INPUTS[name](tokens)).loss.backward()
        return found, sum(one.count for one in values.stand_ins.given)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
@pytest.mark.parametrize("name", INPUTS)
def test_a_mask_is_made_only_where_a_gpu_gets_one(kind: str, name: str) -> None:
    (mask,), stand_ins = masks_of(kind, name)
    assert (mask is not None) == (name in MASKED)
    assert bool(stand_ins) == (name == "a mask that depends on data")


@pytest.mark.slow
def test_a_window_of_attention_has_its_mask() -> None:
    (mask,), _ = masks_of("Mistral", "no mask", sliding_window=WINDOW)
    assert mask.shape[-2:] == (TOKENS, TOKENS)


def test_the_library_gets_its_question_back() -> None:
    module = ModuleType("transformers.masking_utils")
    asked: list[Any] = []
    module.is_tracing = original = lambda tensor=None: asked.append(tensor)  # type: ignore[attr-defined]
    questions = MaskQuestions()
    for one in (sys, module, module):
        questions.imported(one)
    module.is_tracing("a tensor")  # type: ignore[attr-defined]
    questions.remove()
    assert asked == [None]
    assert module.is_tracing is original  # type: ignore[attr-defined]


def test_a_library_without_the_question_is_left_alone() -> None:
    module, questions = ModuleType("transformers.masking_utils"), MaskQuestions()
    questions.imported(module)
    questions.remove()
    assert not hasattr(module, "is_tracing")
