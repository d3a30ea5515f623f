"""The trainings of published tables: a decoder of transformers' code in bfloat16, its batch, loss and optimizer.

They are made on a virtual machine, without weights. What a table does not say of its training is in its rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.peers.published.optimizers import OnePassAdamW, steps_in_backward

_CHUNK_TOKENS = 1024  # of a fused loss


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder. `family`: "llama", or "qwen3", which normalizes queries and keys."""

    family: str
    layers: int
    width: int
    heads: int
    shared_heads: int
    inner: int
    vocabulary: int
    head_width: int = 128
    has_tied_head: bool = False

    @property
    def block(self) -> str:
        return {"llama": "LlamaDecoderLayer", "qwen3": "Qwen3DecoderLayer"}[self.family]


QWEN3_8B = Shape("qwen3", 36, 4096, 32, 8, 12288, 151936)
LLAMA_8B = Shape("llama", 32, 4096, 32, 8, 14336, 128256)
LLAMA_3B = Shape("llama", 28, 3072, 24, 8, 8192, 128256, has_tied_head=True)


@dataclass(frozen=True, slots=True)
class Training:
    """A step of a decoder. `loss`: "none" sums the hidden states; "whole" has all logits in float32; "chunks" keeps the
    logits in bfloat16 and has float32 for an eighth of them at a time; "fused" has the logits of 1,024 tokens at a
    time. `optimizer`: "", "adamw", "adamw-8bit" or "adamw-8bit-paged". `lora_rank`: adapters at all products of a
    block but keys."""

    shape: Shape
    batch: int
    tokens: int
    loss: str
    optimizer: str = ""
    in_backward: bool = False
    lora_rank: int = 0

    @property
    def pages_state(self) -> bool:
        return self.optimizer.endswith("paged")

    @property
    def key(self) -> str:
        """A name that no other training has."""
        shape = self.shape
        parts = [f"{shape.family} {shape.layers} x {shape.width}", f"{self.batch} x {self.tokens}", self.loss]
        parts += [self.optimizer] * bool(self.optimizer) + ["in backward"] * self.in_backward
        return ", ".join(parts + [f"LoRA {self.lora_rank}"] * bool(self.lora_rank))


@dataclass(slots=True)
class Program:
    """A training that was made. `around_forward` is entered around the trunk's forward pass, and `at_loss` is called
    between the trunk and the loss."""

    model: nn.Module
    trunk: nn.Module
    head: nn.Module
    training: Training
    inputs: Tensor
    labels: Tensor
    optimizer: OnePassAdamW | None
    around_forward: contextlib.AbstractContextManager[Any] | None = None
    at_loss: Callable[[], None] | None = None

    def step(self) -> None:
        with self.around_forward or contextlib.nullcontext():
            hidden = self.trunk(input_ids=self.inputs).last_hidden_state
        if self.at_loss is not None:
            self.at_loss()
        self._loss(hidden).backward()  # type: ignore[no-untyped-call]
        if self.optimizer is not None and not self.training.in_backward:
            self.optimizer.step()

    def _loss(self, hidden: Tensor) -> Tensor:
        if self.training.loss == "none":
            return hidden.sum()
        rows, labels = hidden.flatten(0, 1), self.labels.flatten()
        if self.training.loss == "whole":
            return _entropy(self.head(rows), labels)
        if self.training.loss == "chunks":
            parts = zip(rows.chunk(8), labels.chunk(8), strict=True)
            return _summed(_recomputed(_entropy, self.head(part), wanted) for part, wanted in parts)
        parts = zip(torch.split(rows, _CHUNK_TOKENS), torch.split(labels, _CHUNK_TOKENS), strict=True)
        return _summed(_recomputed(lambda part, wanted: _entropy(self.head(part), wanted), *both) for both in parts)


def _summed(losses: Iterable[Tensor]) -> Tensor:
    total: Tensor = sum(losses)  # type: ignore[assignment]
    return total


def _entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction="sum")


def _recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    out: Tensor = checkpoint(function, *inputs, use_reentrant=False)
    return out


def make(training: Training) -> Program:
    """Makes the training. Call it on a virtual machine."""
    with _made_in_bfloat16():
        model = _decoder(training.shape, training.tokens)
    model.train()
    trunk, head = model.model, model.lm_head
    if training.lora_rank:
        _adapt(model, training.lora_rank)
    optimizer = None
    if training.optimizer:
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = OnePassAdamW(trained, in_8_bits="8bit" in training.optimizer, counts_state=not training.pages_state)
        if training.in_backward:
            steps_in_backward(optimizer, model)
    shape = (training.batch, training.tokens)
    inputs, labels = (torch.randint(training.shape.vocabulary, shape) for _ in range(2))
    return Program(model, trunk, head, training, inputs, labels, optimizer)


def _decoder(shape: Shape, tokens: int) -> Any:
    import transformers

    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[shape.family]
    return model(
        config(
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.shared_heads,
            head_dim=shape.head_width,
            intermediate_size=shape.inner,
            vocab_size=shape.vocabulary,
            tie_word_embeddings=shape.has_tied_head,
            max_position_embeddings=tokens,
            use_cache=False,
        )
    )


def _adapt(model: nn.Module, rank: int) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    names = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lora_" in name


@contextlib.contextmanager
def _made_in_bfloat16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
