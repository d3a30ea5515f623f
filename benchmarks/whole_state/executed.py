"""Runs sessions of whole trainings on virtual machines without data: Llama-3.1-8B on one card of 24 GB, and LoRA of
Llama-3.1-70B on one of 32 GB.

    python -m benchmarks.whole_state.executed [--layers N] [--steps N] [--host SIZE]

The models are those of transformers in bfloat16, without weights. Their loss is computed in chunks that torch
checkpoints. A session gets the model, the optimizer and a budget, and decides by itself what leaves. The 8B trains all
parameters on 2 x 8,192 tokens, with torch's AdamW, whose moments are bfloat16, and with one that keeps masters and
moments in float32. The latter also runs with layers that torch checkpoints, in 128 GiB of the host. The 70B trains
adapters of PEFT of rank 16 on 4,096 tokens, in 192 GiB of the host. Steps are beside those of the same program with
memory for everything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import vdnn
from benchmarks.text_table import render_table

RESULTS = Path(__file__).parent.parent / "results" / "whole_state_executed.txt"
_CHUNK = 2048
_GIB = 1 << 30


class MasterAdamW(torch.optim.Optimizer):
    """AdamW for weights in bfloat16, with masters and moments in float32: 12 bytes of state a parameter."""

    def __init__(self, parameters: Any, lr: float = 1e-5, weight_decay: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(group, parameter, self.state[parameter])

    def _step(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            master = parameter.float()
            state |= {"step": 0, "master": master, "m": torch.zeros_like(master), "v": torch.zeros_like(master)}
        state["step"] += 1
        (first, second), rate, gradient = group["betas"], group["lr"], parameter.grad.float()  # type: ignore[union-attr]
        state["master"].mul_(1 - rate * group["weight_decay"])
        state["m"].lerp_(gradient, 1 - first)
        state["v"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = (state["v"] / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        state["master"].addcdiv_(state["m"], scale, value=-rate / (1 - first ** state["step"]))
        parameter.copy_(state["master"])


@dataclass(frozen=True, slots=True)
class Model:
    """The shapes of a model of Llama's kind, what it is trained on, and the card and the budget."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    batch: int
    tokens: int
    machine: str
    budget: str


LLAMA_8B = Model("Llama-3.1-8B", 4096, 14336, 32, 32, 2, 8192, "rtx-4090", "23GiB")
LLAMA_70B = Model("Llama-3.1-70B", 8192, 28672, 80, 64, 1, 4096, "rtx-5090", "31GiB")


@dataclass(frozen=True, slots=True)
class Training:
    """`checkpoints`: torch recomputes each layer. `host`: the memory that the session may pin; None: no limit.
    `adapted`: the layers that get adapters, which alone are trained then."""

    name: str
    optimizer: Callable[..., torch.optim.Optimizer]
    model: Model = LLAMA_8B
    checkpoints: bool = False
    host: str | None = None
    adapted: str | tuple[str, ...] = ()


TRAININGS = (
    Training("AdamW, bfloat16", torch.optim.AdamW),
    Training("AdamW, masters in float32", MasterAdamW),
    Training("the same, layers checkpointed, 128 GiB of the host", MasterAdamW, checkpoints=True, host="128GiB"),
    Training(
        "LoRA of attention, 192 GiB of the host",
        torch.optim.AdamW,
        LLAMA_70B,
        host="192GiB",
        adapted=("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    Training(
        "LoRA of all layers, 192 GiB of the host", torch.optim.AdamW, LLAMA_70B, host="192GiB", adapted="all-linear"
    ),
)


@dataclass(frozen=True, slots=True)
class Step:
    """`managed`: what the session lets leave by then. `host_bytes`: all pinned memory."""

    step_ns: int
    peak_bytes: int
    managed: str = ""
    host_bytes: int = 0


def llama(model: Model, layers: int) -> nn.Module:
    """A model of these shapes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=model.heads,
        num_key_value_heads=8,
        use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        made: nn.Module = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return made


def _adapted(model: nn.Module, layers: str | tuple[str, ...]) -> Any:
    """The same with adapters of PEFT at these layers, in bfloat16."""
    import peft

    where = layers if isinstance(layers, str) else list(layers)
    return peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=where)).to(torch.bfloat16)


def _chunk_loss(hidden: torch.Tensor, head: nn.Module | torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = head(hidden) if isinstance(head, nn.Module) else hidden @ head.t()
    return nn.functional.cross_entropy(logits.float(), labels, reduction="sum")


def _step(model: Any, tokens: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    # A frozen weight that has left comes for calls of its module alone. A trained one that is read elsewhere stays.
    head = model.lm_head.weight if model.lm_head.weight.requires_grad else model.lm_head
    hidden, labels = model.model(input_ids=tokens).last_hidden_state.flatten(0, 1), tokens.flatten()
    losses = [
        checkpoint(
            _chunk_loss,
            hidden[begin : begin + _CHUNK],
            head,
            labels[begin : begin + _CHUNK],
            use_reentrant=False,
        )
        for begin in range(0, len(labels), _CHUNK)
    ]
    loss: torch.Tensor = torch.stack(losses).sum() / len(labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def _program(
    layers: int, training: Training, *, checkpoints: bool
) -> Iterator[tuple[vdnn.VirtualMachine, Any, Any, Callable[[], Step]]]:
    """The machine, the model, its optimizer, and a function that takes one step."""
    shapes = training.model
    with vdnn.VirtualMachine(shapes.machine) as machine:
        base: Any = llama(shapes, layers)
        if checkpoints:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        model = _adapted(base, training.adapted) if training.adapted else base
        tokens = torch.ones(shapes.batch, shapes.tokens, dtype=torch.int64)
        made = training.optimizer([one for one in model.parameters() if one.requires_grad])

        def step() -> Step:
            machine.reset_peak()
            began = machine.now_ns
            _step(base, tokens, made)
            return Step(machine.now_ns - began, machine.peak_bytes)

        yield machine, model, made, step


def kept(layers: int, training: Training) -> Step:
    """The second step with memory for everything, where nothing is checkpointed but the loss."""
    with _program(layers, training, checkpoints=False) as (_, _, _, step):
        step()
        return step()


def ran(layers: int, training: Training, steps: int) -> list[Step]:
    """The steps of a session."""
    found: list[Step] = []
    with _program(layers, training, checkpoints=training.checkpoints) as (machine, model, made, step):
        given: Any = {"budget": training.model.budget, "limits": vdnn.Limits(host_budget=training.host)}
        with vdnn.offload(device=machine, model=model, optimizer=made, **given) as session:
            for number in range(steps):
                one = step()
                session.step()
                managed = session._engine.extents.of(model)
                name = "" if managed is None else managed.name.lower()
                transport = session._engine.steps.transport
                pinned = 0 if transport is None else transport.pool.stats.pinned_bytes
                found.append(Step(one.step_ns, one.peak_bytes, name, pinned))
                print(f"{training.name}: step {number + 1} of {steps}, {one.step_ns / 1e9:.2f} s", file=sys.stderr)
    return found


def table(model: Model, layers: int, steps: int, host: str | None) -> str:
    """`host`: for the trainings that have no limit of their own."""
    rows = []
    for training in (one for one in TRAININGS if one.model is model):
        whole = kept(layers, training)
        peak = f"{whole.peak_bytes / _GIB:.2f}"
        rows.append((training.name, "everything kept", f"{whole.step_ns / 1e9:.3f}", "1.000", peak, "", ""))
        for number, one in enumerate(ran(layers, replace(training, host=training.host or host), steps), start=1):
            rows.append(
                (
                    training.name,
                    f"step {number}",
                    f"{one.step_ns / 1e9:.3f}",
                    f"{one.step_ns / whole.step_ns:.3f}",
                    f"{one.peak_bytes / _GIB:.2f}",
                    one.managed,
                    f"{one.host_bytes / _GIB:.1f}",
                )
            )
    header = ("training", "step", "s", "x", "peak GiB", "leave", "pinned GiB")
    trained_on = f"{model.batch} x {model.tokens} tokens, {model.machine}, budget {model.budget}"
    return render_table(f"{model.name}'s shapes, {layers} layers, {trained_on}", header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_state.executed")
    parser.add_argument("--layers", type=int, metavar="N", help="default: all of the model")
    parser.add_argument("--steps", type=int, default=6, metavar="N")
    parser.add_argument("--host", metavar="SIZE", help="the memory that the session may pin; default: no limit")
    options = parser.parse_args(arguments)
    tables = [table(one, options.layers or one.layers, options.steps, options.host) for one in (LLAMA_8B, LLAMA_70B)]
    text = "\n\n".join(tables)
    print(text)
    if options.layers is None and options.host is None:
        RESULTS.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
