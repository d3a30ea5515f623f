"""Small models trained on a virtual machine, for tests of recordings, plans, timelines and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import vdnn
from tests.runtime.rigs.limits import grouped
from tests.runtime.rigs.networks import conv_chain, images, perceptron, small_resnet
from vdnn.planning.footprint import offload_everything
from vdnn.planning.recomputing import candidates_of, planned_recompute, with_recomputes
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.step.plan import Action, Plan, PlannedLifetime, make_plan
from vdnn.step.recording import Recording


class Join(nn.Module):
    """Two branches of one map, joined: each map is saved by several operations and used by several."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.left = nn.Conv2d(4, 4, 3, padding=1)
        self.right = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = self.stem(x).tanh()
        joined = torch.cat([self.left(stem).sigmoid(), self.right(stem).sigmoid() * stem[:, :4]], 1)
        left, right = joined.chunk(2, 1)
        outcome: torch.Tensor = self.head((left * right).mean((2, 3)))
        return outcome


def recurrent() -> nn.Module:
    return nn.LSTM(8, 8, num_layers=2)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "chain": lambda: (conv_chain(), (images(16),)),
    "perceptron": lambda: (perceptron(64, 6), (torch.randn(128, 64),)),
    "resnet": lambda: (small_resnet(), (images(8),)),
    "join": lambda: (Join(), (images(8),)),
    "recurrent": lambda: (recurrent(), (torch.randn(12, 16, 8),)),
}


def loss_of(output: Any) -> torch.Tensor:
    tensor = output if isinstance(output, torch.Tensor) else output[0]
    return tensor.square().sum()


def decided_by(policy: Any) -> dict[str, Any]:
    """The argument of vdnn.offload that takes this plan or policy."""
    return {"plan" if isinstance(policy, Plan) else "policy": policy}


def train(
    machine: VirtualMachine, name: str, policy: Any = None, steps: int = 3, **options: Any
) -> tuple[Session, list[torch.Tensor | None]]:
    """Runs some steps of gradient descent in a session that moves everything, or that follows a plan for its budget.
    Returns the session and the last gradients."""
    policy = policy or ("auto" if "budget" in options else "vdnn-all")
    torch.manual_seed(3)
    model, inputs = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gradients: list[torch.Tensor | None] = []
    options = grouped({"min_bytes": 0, "measure": True, **options})
    with vdnn.offload(**decided_by(policy), device=machine, **options) as session:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model(*inputs)).backward()
            gradients = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
            optimizer.step()
    return session, gradients


def trained_virtually(name: str, policy: Any = None, **options: Any) -> Session:
    with VirtualMachine("titan-x") as machine:
        return train(machine, name, policy, **options)[0]


def recording_of(name: str) -> Recording:
    recording = trained_virtually(name).recording
    assert recording is not None
    return recording


def recompute_all(recording: Recording, *, offload_rest: bool) -> Plan:
    """A plan that recomputes everything with a recipe. The rest is kept, or offloaded as often as possible."""
    chosen = set(candidates_of(recording))
    followed = with_recomputes(recording, chosen)
    rest = offload_everything(followed)
    lifetimes = tuple(
        planned_recompute(recording.lifetimes[index])
        if index in chosen
        else rest[index]
        if offload_rest
        else PlannedLifetime(one.nbytes, Action.KEEP)
        for index, one in enumerate(followed.lifetimes)
    )
    return make_plan(followed, "everything", lifetimes)
