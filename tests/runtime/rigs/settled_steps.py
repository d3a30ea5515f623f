"""A small network whose steps settle under a plan, and the ways in which one of its steps may differ.

Real numbers on a virtual machine. No parameter changes, so each step has the gradients of the same step of plain torch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import vdnn
from tests.runtime.rigs.virtual_training import recompute_all
from vdnn.planning.footprint import offload_everything
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.settling import Settling
from vdnn.step.plan import Plan, make_plan

LAYERS = 10
_WIDTH, _BATCH = 32, 64
# Recorded, planned, and learned; with some to spare.
_MOST_STEPS = 12


@dataclass(frozen=True)
class Change:
    """How one step differs, at one of its layers."""

    name: str
    at: int


Changed = Callable[[torch.Tensor], torch.Tensor]


def _in_another_dtype(y: torch.Tensor) -> torch.Tensor:
    return y.double().sin().float()


def _of_another_size(y: torch.Tensor) -> torch.Tensor:
    return torch.cat([y[: _BATCH // 2].cos(), y[_BATCH // 2 :]])


def _unused(y: torch.Tensor) -> torch.Tensor:
    y.detach().requires_grad_().exp()
    return y


def _flushed(y: torch.Tensor) -> torch.Tensor:
    """Under a setting of torch that changes bits."""
    torch.set_flush_denormal(True)
    try:
        return (y * 1e-38).relu() * 1e38
    finally:
        torch.set_flush_denormal(False)


def _of_a_custom_function(y: torch.Tensor) -> torch.Tensor:
    return _Doubled.apply(y)


def _nested_backward(y: torch.Tensor) -> torch.Tensor:
    inner = y.detach().requires_grad_()
    inner.tanh().sum().backward()
    return y + inner.grad if inner.grad is not None else y


class _Doubled(torch.autograd.Function):
    """Overwrites the gradient that it gets, and reads what it saved twice."""

    @staticmethod
    def forward(ctx, y):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(y, y * 2)
        return y.sin()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        y, doubled = ctx.saved_tensors
        return gradient * torch.cos(y) + 0 * doubled


IN_THE_FORWARD: dict[str, Changed] = {
    "an extra save": lambda y: y.sigmoid(),
    "two extra saves": lambda y: y.sigmoid().exp(),
    "another operation": lambda y: y + y.relu(),
    "another dtype": _in_another_dtype,
    "another size": _of_another_size,
    "a save that is never used": _unused,
    "other settings of torch": _flushed,
    "a custom function": _of_a_custom_function,
    "a step within the step": _nested_backward,
    "a transposed save": lambda y: y.t().contiguous().sin().t(),
    "an alias": lambda y: y.view(-1).sin().view_as(y),
    "saved under vdnn.paused": lambda y: _paused(y),
    "a write": lambda y: y.sin().mul_(2),
    "under vmap": lambda y: torch.func.vmap(torch.sin)(y),
}
IN_THE_BACKWARD = ("a missing use", "two backward passes", "a gradient of a gradient", "no backward at all")
SKIPPED = "a missing layer"
CHANGES = (*IN_THE_FORWARD, *IN_THE_BACKWARD, SKIPPED)
# Within a layer that can be recomputed. Most leave every save as it was: only the recipes differ.
OF_A_RECIPE = (
    "another scalar",
    "another probability of dropout",
    "a write to an input",
    "another module of the same shape",
    "a module without gradients",
)


def _paused(y: torch.Tensor) -> torch.Tensor:
    with vdnn.paused():
        return y.sin()


class Network:
    """Linear layers and tanh, without modules."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [(torch.randn(_WIDTH, _WIDTH, generator=generator) / 6).requires_grad_() for _ in range(LAYERS)]
        self.x = torch.randn(_BATCH, _WIDTH, generator=generator)

    def step(self, change: Change | None = None) -> list[torch.Tensor | None]:
        """The gradients of one step."""
        torch.manual_seed(0)
        for weight in self.weights:
            weight.grad = None
        y, middle = self.x, self.x
        for number, weight in enumerate(self.weights):
            is_here = change is not None and change.at == number
            if is_here and change is not None and change.name == SKIPPED:
                continue
            y = self.layer(y, number, weight, change.name if is_here and change is not None else "")
            if is_here and change is not None and change.name in IN_THE_FORWARD:
                y = IN_THE_FORWARD[change.name](y)
            if is_here:
                middle = y
        self._backward(y, middle, "" if change is None else change.name)
        return [weight.grad for weight in self.weights]

    def layer(self, y: torch.Tensor, number: int, weight: torch.Tensor, change: str) -> torch.Tensor:
        return torch.tanh(y @ weight)

    def _backward(self, y: torch.Tensor, middle: torch.Tensor, name: str) -> None:
        if name == "no backward at all":
            return
        if name == "a missing use":
            middle.square().mean().backward()
        elif name == "two backward passes":
            y.square().mean().backward(retain_graph=True)
            y.square().mean().backward()
        elif name == "a gradient of a gradient":
            (gradient,) = torch.autograd.grad(y.square().mean(), self.weights[:1], create_graph=True)
            (gradient.square().sum() + y.square().mean()).backward()
        else:
            y.square().mean().backward()


class RecomputableNetwork(Network):
    """Norms and GELU, which can be recomputed; masks, which can be packed; and indices of maxima, whose maker is found
    only later."""

    def __init__(self) -> None:
        super().__init__()
        self._norms = [torch.nn.LayerNorm(_WIDTH) for _ in range(LAYERS)]

    def layer(self, y: torch.Tensor, number: int, weight: torch.Tensor, change: str) -> torch.Tensor:
        norm = self._norms[number]
        eps = norm.eps
        try:
            if change == "another scalar":
                norm.eps = 0.25
            elif change == "another module of the same shape":
                norm = torch.nn.LayerNorm(_WIDTH)
                torch.nn.init.constant_(norm.bias, 0.5)
            norm.requires_grad_(change != "a module without gradients")
            y = norm(y @ weight)
            if change == "a write to an input":
                y.mul_(1.5)
        finally:
            self._norms[number].requires_grad_()
            self._norms[number].eps = eps
        y = torch.nn.functional.gelu(y)
        y = torch.native_dropout(y, 0.6 if change == "another probability of dropout" else 0.3, True)[0]
        if number % 3 == 1:
            y = torch.nn.functional.max_pool2d(y[None, None], 3, 1, 1)[0, 0]
        return y


KEEPS_ALL, OFFLOADS_SOME, OFFLOADS_ALL = "a budget of 1 GiB", "a budget that offloads some", "a plan that offloads all"
PLANS = (KEEPS_ALL, OFFLOADS_SOME, OFFLOADS_ALL)
RECOMPUTES, RECOMPUTES_AND_OFFLOADS = "a plan that recomputes", "a plan that recomputes and offloads"
RECOMPUTES_SOME = "a budget that recomputes some"
PLANS_WITH_RECOMPUTES = (RECOMPUTES, RECOMPUTES_AND_OFFLOADS, RECOMPUTES_SOME)
_BUDGETS = {KEEPS_ALL: "1GiB", OFFLOADS_SOME: "128KiB", RECOMPUTES_SOME: "340KiB"}


def network_for(plan: str) -> Network:
    return RecomputableNetwork() if plan in PLANS_WITH_RECOMPUTES else Network()


@contextlib.contextmanager
def settled_session(plan: str, **options: Any) -> Iterator[tuple[Session, Network]]:
    """A session whose steps are settled under one of PLANS or PLANS_WITH_RECOMPUTES."""
    with VirtualMachine("titan-x", fake=False) as machine:
        network = network_for(plan)
        options["recompute"] = plan in PLANS_WITH_RECOMPUTES
        if plan == RECOMPUTES_SOME:
            options["policy"] = "dtr"
        options |= {"budget": _BUDGETS[plan]} if plan in _BUDGETS else {"plan": _plan(plan, machine, network)}
        with vdnn.offload(device=machine, min_bytes=0, **options) as session:
            settle(session, network)
            yield session, network


def _plan(plan: str, machine: VirtualMachine, network: Network) -> Plan:
    recomputes = plan in PLANS_WITH_RECOMPUTES
    with vdnn.offload("keep", device=machine, recompute=recomputes, min_bytes=0, measure=True) as session:
        for _ in range(2):
            network.step()
            session.step()
    recording = session.recording
    assert recording is not None
    if recomputes:
        return recompute_all(recording, offload_rest=plan == RECOMPUTES_AND_OFFLOADS)
    return make_plan(recording, "everything", offload_everything(recording))


def settling_of(session: Session) -> Settling:
    steps = session._engine.steps
    assert steps.settling is not None
    return steps.settling


def settle(session: Session, network: Network) -> None:
    """Runs steps until one was settled from its first save to its last."""
    for count in itertools.count():
        network.step()
        session.step()
        if settling_of(session).is_expected:
            return
        assert count < _MOST_STEPS, "the step does not settle"
