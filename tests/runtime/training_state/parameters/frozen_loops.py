"""Fine-tuning loops over models with frozen parameters, and the plain runs that they are compared with.

A loop knows nothing of a session. It returns all that can differ: losses, parameters, and what it saved in between.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import vdnn
from vdnn import _C

STEPS = 20
WIDTH = 16
Inside = Callable[[Any], AbstractContextManager[Any]]


class LowRank(nn.Module):
    """A frozen linear layer with a trained low-rank change beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(rank, layer.in_features))
        self.up = nn.Parameter(0.1 * torch.randn(layer.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outcome: torch.Tensor = self.layer(x) + x @ self.down.t() @ self.up.t()
        return outcome


class Tied(nn.Module):
    """A frozen embedding that is the head as well: the head reads it outside of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH).requires_grad_(False)
        self.body = LowRank(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 7).long() % 32
        return linear(self.body(self.embedding(tokens)), self.embedding.weight)


class Twice(nn.Module):
    """One frozen layer that runs twice, under a scale of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.shared(self.first(x)).tanh()) * self.scale


class Checkpointed(nn.Module):
    """A recompute saves the frozen weight of a norm itself, and that of a linear layer as a view."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        norms = [nn.LayerNorm(WIDTH).requires_grad_(False) for _ in range(3)]
        self.blocks = nn.ModuleList(nn.Sequential(norm, LowRank(nn.Linear(WIDTH, WIDTH))) for norm in norms)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if not torch.is_grad_enabled():
                x = block(x).relu()
                continue
            x = checkpoint(lambda y, block=block: block(y).relu(), x, use_reentrant=self.use_reentrant)
        return x


class HooksOfItsOwn(nn.Module):
    """Saved-tensor hooks of the model keep parameters that are saved themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.layer = LowRank(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hooks = torch.autograd.graph.saved_tensors_hooks(_without_graph, lambda tensor: tensor)
        with hooks if torch.is_grad_enabled() else nullcontext():
            outcome: torch.Tensor = self.layer(self.norm(self.first(x)))
            return outcome


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_leaf else tensor.detach()


def _attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True).requires_grad_(False)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, 4))


def _recurrent() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.inner = nn.LSTM(WIDTH, WIDTH, batch_first=True).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outcome: torch.Tensor = self.inner(self.first(x).unsqueeze(1).expand(-1, 3, -1))[0]
            return outcome

    return Last()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "low-rank": lambda: nn.Sequential(*[nn.Sequential(LowRank(nn.Linear(WIDTH, WIDTH)), nn.GELU()) for _ in range(4)]),
    "backbone": lambda: nn.Sequential(
        nn.Unflatten(1, (1, WIDTH)),
        nn.Sequential(nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(56, WIDTH)).requires_grad_(False),
        nn.Linear(WIDTH, 4),
    ),
    "tied": Tied,
    "twice": Twice,
    "checkpointed": lambda: Checkpointed(use_reentrant=False),
    "checkpointed-reentrant": lambda: Checkpointed(use_reentrant=True),
    "hooks-of-its-own": HooksOfItsOwn,
    "attention": _attention,
    "recurrent": _recurrent,
}


def made(model: str) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[model]()


@contextlib.contextmanager
def frozen_away(device: _C.Device, model: nn.Module, **options: Any) -> Iterator[vdnn.Session]:
    session = vdnn.offload(
        "vdnn-all", **{"device": device, "min_bytes": 0, "model": model, "parameters": "frozen", **options}
    )
    with contextlib.closing(session), session:
        yield session


def plain(model: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


def train(
    model: nn.Module, loop: str, inside: Inside = plain, steps: int = STEPS, *, takes_optimizer: bool = False
) -> list[Any]:
    """Every loss, what the loop found in between, and the parameters at the end. `inside` takes the model, or the
    optimizer."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    found: list[Any] = []
    with inside(optimizer if takes_optimizer else model):
        for step in range(steps):
            batches = [torch.randn(6, WIDTH, generator=generator) for _ in range(2 if loop == "accumulated" else 1)]
            for batch in batches:
                with torch.autocast("cpu", torch.bfloat16, enabled=loop == "autocast"):
                    loss = model(batch).float().square().mean()
                loss.backward()
                found.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 2:
                found += between(model, batches[0], loop)
    return found + [one.detach().clone() for one in model.parameters()]


def between(model: nn.Module, batch: torch.Tensor, loop: str) -> list[torch.Tensor]:
    """Does what programs do between two steps, and returns what they see."""
    if loop == "evaluated":
        model.eval()
        with torch.no_grad():
            under_no_grad = model(batch).clone()
        with torch.inference_mode():
            inferred = model(batch)
        model.train()
        return [under_no_grad, inferred.clone()]
    if loop == "saved":
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        copied = copy.deepcopy(model)
        return [*torch.load(buffer).values(), *(one.detach() for one in copied.parameters()), copied(batch).detach()]
    if loop == "loaded":
        model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
        with torch.no_grad():
            for one in model.parameters():
                one.data.mul_(1.01)
    return []


LOOPS = ["plain", "accumulated", "autocast", "evaluated", "saved", "loaded"]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
