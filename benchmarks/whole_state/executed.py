"""Runs sessions of Llama-3.1-8B on a virtual machine without data: a whole training on one card of 24 GB.

    python -m benchmarks.whole_state.executed [--layers N] [--steps N] [--host SIZE]

The model is that of transformers in bfloat16, without weights, on 2 x 8,192 tokens. Its loss is computed in chunks that
torch checkpoints. A session gets the model, the optimizer and a budget, and decides by itself what leaves. It runs with
torch's AdamW, whose moments are bfloat16, and with one that keeps masters and moments in float32. The latter also runs
with layers that torch checkpoints, in 128 GiB of the host. Their steps are beside those of the same program with memory
for everything.
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
MACHINE, BUDGET = "rtx-4090", "23GiB"
_BATCH, _TOKENS, _CHUNK = 2, 8192, 2048
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
class Training:
    """`checkpoints`: torch recomputes each layer. `host`: the memory that the session may pin; None: no limit."""

    name: str
    optimizer: Callable[..., torch.optim.Optimizer]
    checkpoints: bool = False
    host: str | None = None


TRAININGS = (
    Training("AdamW, bfloat16", torch.optim.AdamW),
    Training("AdamW, masters in float32", MasterAdamW),
    Training("the same, layers checkpointed, 128 GiB of the host", MasterAdamW, checkpoints=True, host="128GiB"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """`managed`: what the session lets leave by then. `host_bytes`: all pinned memory."""

    step_ns: int
    peak_bytes: int
    managed: str = ""
    host_bytes: int = 0


def llama(layers: int) -> nn.Module:
    """The shapes of Llama-3.1-8B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: nn.Module = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return model


def _chunk_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum")


def _step(model: Any, tokens: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    hidden, labels = model.model(input_ids=tokens).last_hidden_state.flatten(0, 1), tokens.flatten()
    losses = [
        checkpoint(
            _chunk_loss,
            hidden[begin : begin + _CHUNK],
            model.lm_head.weight,
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
    with vdnn.VirtualMachine(MACHINE) as machine:
        model: Any = llama(layers)
        tokens = torch.ones(_BATCH, _TOKENS, dtype=torch.int64)
        made = training.optimizer(model.parameters())
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})

        def step() -> Step:
            machine.reset_peak()
            began = machine.now_ns
            _step(model, tokens, made)
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
        limits = vdnn.Limits(host_budget=training.host)
        with vdnn.offload(budget=BUDGET, device=machine, model=model, optimizer=made, limits=limits) as session:
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


def table(layers: int, steps: int, host: str | None) -> str:
    """`host`: for the trainings that have no limit of their own."""
    rows = []
    for training in TRAININGS:
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
    title = f"Llama-3.1-8B's shapes, {layers} layers, {_BATCH} x {_TOKENS} tokens, {MACHINE}, budget {BUDGET}"
    return render_table(title, header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_state.executed")
    parser.add_argument("--layers", type=int, default=32, metavar="N")
    parser.add_argument("--steps", type=int, default=6, metavar="N")
    parser.add_argument("--host", metavar="SIZE", help="the memory that the session may pin; default: no limit")
    options = parser.parse_args(arguments)
    text = table(options.layers, options.steps, options.host)
    print(text)
    if options.layers == 32 and options.host is None:
        RESULTS.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
