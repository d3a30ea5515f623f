"""The cases: trainings of real size, each with the sizes of its steps, drawn from seeded generators.

A size says all that a step depends on: two steps of one size are equal. Steps of one structure have the same operations
and modules, and differ in sizes only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.models.resnet import resnet
from benchmarks.models.workload import IMAGENET_CLASSES, CrossEntropy, images
from benchmarks.shapes.networks import CHOSEN, Decoder, Encoder, Shape

Size = tuple[int | str, ...]
STEPS = 30


@dataclass(frozen=True, slots=True)
class Subject:
    """The optimizers of all models, and what a step of a given size does."""

    optimizers: Sequence[torch.optim.Optimizer]
    train: Callable[[Size], None]

    def make_states(self) -> None:
        """Makes the states of all optimizers, as steps would have."""
        for optimizer in self.optimizers:
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()


def _one_structure(size: Size) -> object:
    return None


@dataclass(frozen=True, slots=True)
class Case:
    """`structure` maps a size to its step's structure. `has_session_per_step`: a session is entered anew for each
    step, and compared with one session around all steps."""

    name: str
    make: Callable[[], Subject]
    sizes: tuple[Size, ...]
    structure: Callable[[Size], object] = _one_structure
    has_session_per_step: bool = False


# What the steps do.


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _backward_and_step(optimizer: torch.optim.Optimizer, losses: Sequence[Tensor]) -> None:
    sum(losses, torch.zeros(())).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def decoder(batch: int, shape: Shape) -> Subject:
    """Steps of (length,)."""
    model = Decoder(shape)
    optimizer = _adamw(model)

    def train(size: Size) -> None:
        (length,) = size
        _backward_and_step(optimizer, [model.loss(batch, int(length))])

    return Subject([optimizer], train)


def encoder(shape: Shape) -> Subject:
    """Steps of (texts, length of the longest)."""
    model = Encoder(shape)
    optimizer = _adamw(model)

    def train(size: Size) -> None:
        batch, length = size
        _backward_and_step(optimizer, [model.loss(int(batch), int(length))])

    return Subject([optimizer], train)


def convolutions(blocks: tuple[int, ...]) -> Subject:
    """Steps of (images, side)."""
    model = resnet(1, blocks, side=32).model
    optimizer = _sgd(model)

    def train(size: Size) -> None:
        batch, side = map(int, size)
        loss = CrossEntropy(IMAGENET_CLASSES, batch)(model(images(batch, side)))
        _backward_and_step(optimizer, [loss])

    return Subject([optimizer], train)


def micro_batches(batch: int, shape: Shape) -> Subject:
    """Steps of the lengths of their micro-batches, whose gradients are summed."""
    model = Decoder(shape)
    optimizer = _adamw(model)

    def train(size: Size) -> None:
        for length in size:
            model.loss(batch, int(length)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return Subject([optimizer], train)


def two_models(batch: int, shapes: Sequence[Shape]) -> Subject:
    """Steps of (index of the model, length). Each model has its optimizer."""
    models = [Decoder(shape) for shape in shapes]
    optimizers = [_adamw(model) for model in models]

    def train(size: Size) -> None:
        index, length = map(int, size)
        _backward_and_step(optimizers[index], [models[index].loss(batch, length)])

    return Subject(optimizers, train)


def evaluated(batch: int, shape: Shape) -> Subject:
    """Steps of (length, kind). Before an "evaluated" step the model is evaluated without gradients; an "extra" step
    adds the loss of another forward pass, on a quarter of the batch."""
    model = Decoder(shape)
    optimizer = _adamw(model)

    def train(size: Size) -> None:
        length, kind = int(size[0]), size[1]
        if kind == "evaluated":
            model.eval()
            with torch.no_grad():
                model.loss(batch, length)
            model.train()
        losses = [model.loss(batch, length)]
        if kind == "extra":
            losses.append(model.loss(batch // 4, length))
        _backward_and_step(optimizer, losses)

    return Subject([optimizer], train)


def mixture(batch: int, length: int, shape: Shape) -> Subject:
    """Steps of (seed of the routes,). Which expert takes how many tokens changes with each step."""
    model = Decoder(shape)
    optimizer = _adamw(model)

    def train(size: Size) -> None:
        routes = routes_of(int(size[0]), batch * length, shape)
        _backward_and_step(optimizer, [model.loss(batch, length, routes)])

    return Subject([optimizer], train)


# The sizes of the steps.


def routes_of(seed: int, tokens: int, shape: Shape) -> list[list[int]]:
    """The tokens of each expert in each layer. About one expert in eight has none."""
    numbers = random.Random(seed)
    return [_parts(numbers, CHOSEN * tokens, shape.experts) for _ in range(shape.layers)]


def _parts(numbers: random.Random, total: int, parts: int) -> list[int]:
    weights = [0.0 if numbers.random() < 0.125 else numbers.uniform(0.5, 1.5) for _ in range(parts)]
    weights[numbers.randrange(parts)] += 0.5  # so that not all are 0
    counts = [int(total * weight / sum(weights)) for weight in weights]
    counts[counts.index(max(counts))] += total - sum(counts)
    return counts


def _any_of(values: Sequence[int], steps: int, seed: int) -> list[int]:
    return random.Random(seed).choices(values, k=steps)


_MANY_LENGTHS = range(128, 1025, 32)
_TEN_LENGTHS = (128, 192, 256, 352, 448, 544, 640, 768, 896, 1024)
_SIDES = range(192, 449, 32)
_SMALL = Shape(width=512, heads=8)
_LARGE = Shape(width=1024, heads=16)
_MIXTURE = Shape(vocabulary=4_000, width=512, heads=8, layers=2, experts=8)
_KINDS = ("trained", "trained", "evaluated", "trained", "extra", "trained")

CASES = (
    Case("decoder", partial(decoder, 8, Shape()), tuple((length,) for length in _any_of(_MANY_LENGTHS, STEPS, 1))),
    Case(
        "padded encoder",
        partial(encoder, Shape()),
        tuple((32, length) for length in _any_of(range(32, 513, 24), STEPS, 2)),
    ),
    Case(
        "encoder by tokens",
        partial(encoder, Shape()),
        tuple((16_384 // length, length) for length in _any_of(range(64, 513, 64), STEPS, 3)),
    ),
    Case(
        "multi-scale images",
        partial(convolutions, (1, 2, 2, 1)),
        tuple((32, side) for side in _any_of(_SIDES, STEPS, 4)),
    ),
    Case(
        "smaller last batch",
        partial(convolutions, (1, 2, 2, 1)),
        tuple((20 if step % 6 == 5 else 64, 224) for step in range(STEPS)),
    ),
    Case(
        "four micro-batches",
        partial(micro_batches, 8, Shape(layers=2)),
        tuple(tuple(_any_of(_TEN_LENGTHS, 4, 100 + step)) for step in range(20)),
    ),
    Case(
        "two models in turn",
        partial(two_models, 8, (_SMALL, _LARGE)),
        tuple((step % 2, length) for step, length in enumerate(_any_of(_TEN_LENGTHS[1::2], STEPS, 6))),
        structure=lambda size: size[0],
    ),
    Case(
        "evaluation and extra loss",
        partial(evaluated, 8, Shape()),
        tuple(
            (length, _KINDS[step % len(_KINDS)]) for step, length in enumerate(_any_of(_TEN_LENGTHS[2::3], STEPS, 7))
        ),
        structure=lambda size: size[1],
    ),
    Case("mixture of experts", partial(mixture, 16, 512, _MIXTURE), tuple((seed,) for seed in range(24))),
    Case(
        "length curriculum",
        partial(decoder, 8, Shape()),
        tuple((128 + 64 * (step // 2),) for step in range(STEPS)),
    ),
    Case(
        "session per step",
        partial(decoder, 8, Shape()),
        tuple((length,) for length in _any_of(_TEN_LENGTHS, STEPS, 10)),
        has_session_per_step=True,
    ),
)
