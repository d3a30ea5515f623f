"""Optimizers of other kinds than torch's, in every way of managing their state: some replace the data of a parameter or
write to its gradient, and some keep state in tuples and deques, or state that belongs to no parameter."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import vdnn
from deferred import DeferredAccelerator, Mode
from tests.runtime.training_state.conftest import NARROW
from tests.runtime.training_state.ways import options_of
from vdnn.errors import VdnnError
from vdnn.runtime.training_state import cpu_steps

# Each run here draws others of the combinations of a way, an optimizer and a mode.
pytestmark = pytest.mark.drawn(of=2)

WAYS = ["state", "all", "on the cpu", "all, on the cpu"]
ways = pytest.mark.parametrize("way", WAYS)


class Plain(torch.optim.Optimizer):
    """Calls `update` for each parameter with a gradient."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group["lr"])

    def update(self, parameter: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        parameter.add_(parameter.grad, alpha=-lr)  # type: ignore[arg-type]


class ReplacesData(Plain):
    def update(self, parameter: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        state["n"] = state.get("n", 0) + 1
        parameter.data = parameter.data - lr * parameter.grad  # type: ignore[operator]


class WritesToGradients(Plain):
    def update(self, parameter: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        parameter.grad.mul_(0.5)  # type: ignore[union-attr]
        super().update(parameter, state, lr)


class ReplacesGradients(Plain):
    def update(self, parameter: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        parameter.grad = parameter.grad + 0.1 * parameter  # type: ignore[operator]
        super().update(parameter, state, lr)


class InATuple(Plain):
    def update(self, parameter: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["moments"] = torch.zeros_like(parameter), torch.ones_like(parameter)
        mean, scale = state["moments"]
        mean.mul_(0.9).add_(parameter.grad)
        scale.add_(parameter.grad.square())  # type: ignore[union-attr]
        parameter.add_(mean / scale.sqrt(), alpha=-lr)


class Moments(NamedTuple):
    mean: torch.Tensor
    steps: int


class InANamedTuple(Plain):
    def update(self, parameter: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        known = state.get("moments", Moments(torch.zeros_like(parameter), 0))
        state["moments"] = Moments(known.mean.mul_(0.9).add_(parameter.grad), known.steps + 1)
        parameter.add_(known.mean, alpha=-lr / (known.steps + 1))


class InADeque(Plain):
    def update(self, parameter: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        state.setdefault("last", deque(maxlen=2)).append(parameter.grad.clone())  # type: ignore[union-attr]
        parameter.add_(state["last"][0], alpha=-lr)


class UnderAName(Plain):
    """Has state under a name, which its first step makes."""

    def step(self, closure: Any = None) -> None:
        self.state.setdefault("shared", {"seen": torch.ones(8)})  # type: ignore[arg-type]
        super().step()

    def update(self, parameter: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        state.setdefault("mean", torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
        parameter.add_(state["mean"], alpha=-lr)


class CountsUnderAName(Plain):
    """Counts its steps under a name, and keeps a running mean of the losses there, by which it steps."""

    def step(self, closure: Any = None) -> None:
        shared = self.state.setdefault("shared", {"steps": torch.zeros(()), "mean": 0.0})  # type: ignore[arg-type]
        shared["steps"] += 1
        shared["mean"] = 0.5 * shared["mean"] + (0.0 if closure is None else closure())
        super().step()

    def update(self, parameter: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        shared: Any = self.state["shared"]  # type: ignore[index]
        parameter.add_(parameter.grad, alpha=-lr * shared["mean"] / float(shared["steps"]))  # type: ignore[arg-type]


class SumsUnderAName(Plain):
    def update(self, parameter: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        shared: Any = self.state.setdefault("shared", {"elements": 0})  # type: ignore[arg-type]
        shared["elements"] += parameter.numel()


# On a device torch chooses the form for all parameters at once, which rounds otherwise than that for one.
def nadam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(parameters, lr=0.1)


def radam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RAdam(parameters, lr=0.1, weight_decay=0.1)


def nadam_with_a_tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(parameters, lr=torch.tensor(0.1))  # type: ignore[arg-type]


def adam_with_a_tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(0.1))


def asgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.ASGD(parameters, lr=0.1, t0=2)


Make = Callable[[Any], torch.optim.Optimizer]
MADE: list[Make] = [
    ReplacesData,
    WritesToGradients,
    ReplacesGradients,
    InATuple,
    InADeque,
    UnderAName,
    CountsUnderAName,
    nadam,
    nadam_with_a_tensor,
    adam_with_a_tensor,
    radam,
    asgd,
]


def on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: on_cpu(one) for key, one in value.items()}
    return [on_cpu(one) for one in value] if isinstance(value, (list, tuple, deque)) else value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def trained(mode: Mode, make: Make, way: str | None, steps: int = 4) -> Any:
    """Two steps accumulate into each gradient. The last step is made behind the session."""
    with DeferredAccelerator(mode, seed=3, capacity="8MiB") as accelerator, contextlib.ExitStack() as sessions:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).to("deferred")
        optimizer = make(model.parameters())
        session: Any = contextlib.nullcontext()
        if way is not None:
            options: Any = {"device": accelerator, "min_bytes": 0, "limits": NARROW, **options_of(way, model)}
            session = sessions.enter_context(
                contextlib.closing(vdnn.offload("vdnn-all", optimizer=optimizer, **options))
            )
        found: list[Any] = []

        def step(number: int) -> None:
            loss = model(torch.sin(torch.arange(64.0) + number).reshape(4, 16).to("deferred")).square().mean()
            loss.backward()
            optimizer.step(loss.item)
            found.append(on_cpu([one.grad for one in model.parameters()]))
            if number % 2:
                optimizer.zero_grad()

        with session:
            for number in range(steps):
                step(number)
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
            step(steps)
        sessions.close()
        step(steps + 1)
        found += [on_cpu(list(model.parameters())), on_cpu(optimizer.state_dict()["state"])]
        accelerator.synchronize()
        assert accelerator.violations == []
    return found


@ways
@pytest.mark.parametrize("make", MADE)
def test_a_training_has_the_bits_of_one_without_a_session(
    way: str, make: Make, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_steps, "_FUSED_ON_THE_CPU", ())
    assert same(trained(mode, make, way), trained(mode, make, None))


@ways
def test_a_named_tuple_in_the_state_returns_as_one(way: str, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's load_state_dict makes no named tuple, so none is loaded."""
    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", lambda self, saved: None)
    assert same(trained(mode, InANamedTuple, way), trained(mode, InANamedTuple, None))


@ways
def test_an_optimizer_that_sums_over_parameters_under_a_name_is_refused(way: str, mode: Mode) -> None:
    with pytest.raises(VdnnError, match="its state has more than that of parameters"):
        trained(mode, SumsUnderAName, way)


def test_other_shapes_of_a_parameters_data_are_refused_on_the_cpu(mode: Mode) -> None:
    class Grows(Plain):
        def update(self, parameter: nn.Parameter, state: dict[str, Any], lr: float) -> None:
            if parameter.dim() == 2 and parameter.shape[0] == 16:
                parameter.data = parameter.data[:8]

    with pytest.raises(VdnnError, match=r"it gives a parameter of torch.float32 and shape \[16, 16\] data of"):
        trained(mode, Grows, "on the cpu")


class KeepsTheLastData(Plain):
    def update(self, parameter: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        state["last"] = parameter.data
        parameter.data = parameter.data - lr * parameter.grad  # type: ignore[operator]


@pytest.mark.parametrize("way", ["state", "on the cpu"])
def test_the_last_data_in_the_state_stay_what_they_were(way: str, mode: Mode) -> None:
    assert same(trained(mode, KeepsTheLastData, way), trained(mode, KeepsTheLastData, None))


@ways
def test_hooks_of_a_load_that_come_in_the_session_see_all_of_the_state(
    way: str, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_steps, "_FUSED_ON_THE_CPU", ())
    seen: list[int] = []

    def train(managed: str | None) -> Any:
        with DeferredAccelerator(mode, seed=3, capacity="8MiB") as accelerator, contextlib.ExitStack() as sessions:
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)]).to("deferred")
            optimizer = torch.optim.AdamW(model.parameters(), fused=False, foreach=False)
            if managed is not None:
                options: Any = {"device": accelerator, "min_bytes": 0, "limits": NARROW, **options_of(managed, model)}
                session = vdnn.offload("vdnn-all", optimizer=optimizer, **options)
                sessions.enter_context(contextlib.closing(session))
                sessions.enter_context(session)

            def doubled(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
                seen.append(len(saved["state"]))
                states = {key: {**one, "exp_avg": 2 * one["exp_avg"]} for key, one in saved["state"].items()}
                return {**saved, "state": states}

            model(torch.ones(4, 32).to("deferred")).square().mean().backward()
            optimizer.step()
            saved = optimizer.state_dict()
            optimizer.register_load_state_dict_pre_hook(doubled)
            optimizer.register_load_state_dict_pre_hook(doubled, prepend=True)
            optimizer.load_state_dict(saved)
            optimizer.load_state_dict(optimizer.state_dict())
            return on_cpu([one["exp_avg"] for one in optimizer.state.values()])

    assert same(train(way), train(None))
    assert seen == 8 * [6]


@ways
def test_sessions_in_each_other_stream_the_parameters_of_a_model_each(
    way: str, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_steps, "_FUSED_ON_THE_CPU", ())

    def train(managed: str | None) -> Any:
        with DeferredAccelerator(mode, seed=3, capacity="8MiB") as accelerator, contextlib.ExitStack() as sessions:
            torch.manual_seed(0)
            models = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(2)]
            first, second = (one.to("deferred") for one in models)
            optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (first, second)]
            if managed is not None:
                for model, optimizer in zip((first, second), optimizers, strict=True):
                    options: Any = {"device": accelerator, "min_bytes": 0, **options_of(managed, model)}
                    sessions.enter_context(vdnn.offload("vdnn-all", optimizer=optimizer, **options))
            losses = []
            for number in range(3):
                x = torch.sin(torch.arange(128.0) + number).reshape(4, 32).to("deferred")
                loss = second(first(x)).square().mean()
                loss.backward()
                losses.append(loss.item())
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            accelerator.synchronize()
            assert accelerator.violations == []
            return [losses, *on_cpu([*first.parameters(), *second.parameters()])]

    assert same(train(way), train(None))
