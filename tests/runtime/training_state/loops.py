"""Training loops that end with a step of the optimizer, and the optimizers to run them with.

A loop trains `STEPS` steps from a fixed seed and returns all that can differ: every loss, the parameters and the state
of the optimizer. `inside` is entered around the training; a loop knows nothing of a session.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS = 20
Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[[Any], Optimizer]
# Makes the context of the training from its optimizer.
Inside = Callable[..., AbstractContextManager[object]]


class SignOfMomentum(Optimizer):
    """Steps by the sign of a running mean, as Lion does. It counts its steps in the group and on itself."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        self.calls = 0
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.calls += 1
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                update = state["mean"].mul(0.9).add(parameter.grad, alpha=0.1).sign()
                parameter.add_(update, alpha=-group["lr"] / group["step"])
                # Not in place: the state is another tensor after each step.
                state["mean"] = state["mean"].mul(0.99).add(parameter.grad, alpha=0.01)
        return loss


class ScaledByAll(Optimizer):
    """Scales each update by the norm of all gradients, so one parameter's step depends on the others."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in parameters]).norm()
        for one in parameters:
            self.state[one]["seen"] = one.grad.clone()
            one.sub_(one.grad / norm, alpha=self.param_groups[0]["lr"])


def _matrices(parameters: Any) -> Optimizer:
    """Muon takes matrices only."""
    return torch.optim.Muon([one for one in parameters if one.dim() == 2], lr=1e-2)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "momentum-foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True),
    "momentum-fused": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, foreach=False),
    "adam-amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "third-party": SignOfMomentum,
    "muon": _matrices,
}


class Net(nn.Module):
    """Layers of several sizes; `tied` shares a weight between two of them."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 12)
        self.normal = nn.LayerNorm(12)
        self.between = nn.Linear(12, 12)
        self.last = nn.Linear(12, 12)
        if tied:
            self.last.weight = self.between.weight
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.normal(self.inner(x).tanh())
        outcome: torch.Tensor = self.head(self.last(self.between(hidden).relu()).relu())
        return outcome


@dataclass(slots=True)
class Training:
    """A model, its optimizer and its batches, from fixed seeds. `found` collects what is compared."""

    model: nn.Module
    optimizer: Optimizer
    batches: Iterator[torch.Tensor]
    found: list[Any]

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(next(self.batches)).square().mean()
        self.found.append(loss.detach().clone())
        return loss

    def steps(self, number: int) -> Iterator[int]:
        for step in range(number):
            yield step
            self.optimizer.zero_grad()


def begin(make: MakeOptimizer, device: str = "cpu", *, rows: int = 6, **options: bool) -> Training:
    torch.manual_seed(11)
    model = Net(**options).to(device)
    generator = torch.Generator().manual_seed(12)
    batches = (torch.randn(rows, 8, generator=generator).to(device) for _ in iter(int, 1))
    return Training(model, make(model.parameters()), batches, [])


Loop = Callable[[Training], None]


def plain(training: Training) -> None:
    for _ in training.steps(STEPS):
        training.loss().backward()
        training.optimizer.step()


def accumulation(training: Training) -> None:
    for _ in training.steps(STEPS):
        for _ in range(3):
            (training.loss() / 3).backward()
        training.optimizer.step()


def clipped_by_norm(training: Training) -> None:
    for _ in training.steps(STEPS):
        training.loss().backward()
        training.found.append(nn.utils.clip_grad_norm_(training.model.parameters(), 0.1).clone())
        training.optimizer.step()


def clipped_by_value(training: Training) -> None:
    for _ in training.steps(STEPS):
        training.loss().backward()
        nn.utils.clip_grad_value_(training.model.parameters(), 0.01)
        training.optimizer.step()


def scaled_with_a_skipped_step(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    for step in training.steps(STEPS):
        for _ in range(2):
            scaler.scale(training.loss()).backward()
        if step == 7:
            for parameter in training.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(float("inf"))
        scaler.unscale_(training.optimizer)
        training.found.append(nn.utils.clip_grad_norm_(training.model.parameters(), 0.1).clone())
        scaler.step(training.optimizer)
        scaler.update()
        training.found.append(torch.tensor(scaler.get_scale()))
        if step == 7:
            training.model.zero_grad()  # also gradients of parameters that are in no group, which are NaN


def scaled_under_autocast(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in training.steps(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = training.loss()
        scaler.scale(loss).backward()
        scaler.unscale_(training.optimizer)
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
        scaler.step(training.optimizer)
        scaler.update()


def averaged(training: Training) -> None:
    average = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in training.steps(STEPS):
        training.loss().backward()
        training.optimizer.step()
        average.update_parameters(training.model)
    training.found += [parameter.detach() for parameter in average.parameters()]


def scheduled(training: Training) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        training.optimizer, max_lr=0.02, total_steps=STEPS, cycle_momentum=False
    )
    for _ in training.steps(STEPS):
        training.loss().backward()
        training.optimizer.step()
        scheduler.step()
        training.found.append(torch.tensor(scheduler.get_last_lr()))


def with_a_group_added(training: Training) -> None:
    late = training.optimizer.param_groups[0]["params"].pop()
    for step in training.steps(STEPS):
        training.loss().backward()
        training.optimizer.step()
        if step == 5:
            training.optimizer.add_param_group({"params": [late], "lr": 0.003})


def resumed(training: Training) -> None:
    """Saves to a file in the middle, and loads it into the same optimizer again later."""
    saved = io.BytesIO()
    for step in training.steps(STEPS):
        training.loss().backward()
        training.optimizer.step()
        if step == 9:
            torch.save({"m": training.model.state_dict(), "o": training.optimizer.state_dict()}, saved)
        if step == 14:
            saved.seek(0)
            loaded = torch.load(saved, map_location="cpu")
            training.model.load_state_dict(loaded["m"])
            training.optimizer.load_state_dict(loaded["o"])


def by_closures(training: Training) -> None:
    def closure() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.loss()
        loss.backward()
        return loss

    for _ in range(STEPS):
        returned: Any = training.optimizer.step(closure)  # type: ignore[arg-type]
        training.found.append(returned.detach())


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        plain,
        accumulation,
        clipped_by_norm,
        clipped_by_value,
        scaled_with_a_skipped_step,
        scaled_under_autocast,
        averaged,
        scheduled,
        with_a_group_added,
        resumed,
        by_closures,
    )
}


def train(
    make: MakeOptimizer,
    loop: Loop,
    inside: Inside = contextlib.nullcontext,
    device: str = "cpu",
    *,
    with_model: bool = False,
    rows: int = 6,
    **options: bool,
) -> list[Any]:
    """Everything that the training comes to: losses and norms, parameters, the optimizer's state and its options.
    `with_model`: `inside` takes the model as well."""
    training = begin(make, device, rows=rows, **options)
    with inside(training.optimizer, **({"model": training.model} if with_model else {})):
        loop(training)
        saved = copy.deepcopy(training.optimizer.state_dict())
    parameters = [parameter.detach() for parameter in training.model.parameters()]
    calls = getattr(training.optimizer, "calls", None)
    return [*training.found, *parameters, saved["state"], saved["param_groups"], calls]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
