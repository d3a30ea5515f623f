"""Adapters of peft on decoders of transformers: LoRA on every linear layer, in one of four kinds, on a frozen base."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from benchmarks.drawn_models import of_transformers

_KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "dropout": {"lora_dropout": 0.05},
}


def drawn(count: int, seed: int) -> dict[str, Callable[[int], Any]]:
    """Functions of a batch size, by name."""
    chance = random.Random(seed)
    heads = {name: head for name, head in of_transformers.heads_by_type().items() if head[0] == "CAUSAL_LM"}
    names = chance.sample(sorted(heads), count)
    kinds = [chance.choice(list(_KINDS)) for _ in names]
    return {
        f"peft/{kind} {name}": _adapted(of_transformers.of_type(name, *heads[name]), _KINDS[kind])
        for name, kind in zip(names, kinds, strict=True)
    }


def _adapted(make: Callable[[int], Any], options: dict[str, Any]) -> Callable[[int], Any]:
    def build(batch: int) -> Any:
        import peft

        model, inputs = make(batch)
        return peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", **options)), inputs

    return build
