"""The productions of the grammar, by name: how each draws its arguments, and how a world builds it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from tests.fuzz.program import Statement
    from tests.fuzz.world import World

Draw = Callable[[Random], tuple[Any, ...]]


class Production(NamedTuple):
    name: str
    draw: Draw
    build: Callable[[Any, Statement], Any]  # from a world, the function that runs the statement
    arity: int = 1
    weight: float = 0.0  # its weight among operations; 0: the plot of a program places it, and it is never drawn


PRODUCTIONS: dict[str, Production] = {}


def nothing(random: Random) -> tuple[Any, ...]:
    return ()


def statement(name: str, draw: Draw = nothing) -> Callable[..., Any]:
    """Decorates `build(world, statement) -> run`, where run takes no arguments."""

    def register(build: Any) -> Any:
        PRODUCTIONS[name] = Production(name, draw, build)
        return build

    return register


def operation(name: str, arity: int = 1, weight: float = 1.0, draw: Draw = nothing) -> Callable[..., Any]:
    """Decorates `build(world, *args) -> apply`, where apply computes one value from `arity` values."""

    def register(make: Callable[..., Callable[..., torch.Tensor]]) -> Any:
        def build(world: World, one: Statement) -> Callable[[], None]:
            apply = make(world, *one.args)
            out, ins, value = one.out, one.ins, world.value
            if len(ins) == 1:
                (only,) = ins

                def run() -> None:
                    world.values[out] = apply(value(only))

            else:

                def run() -> None:
                    world.values[out] = apply(*[value(slot) for slot in ins])

            return run

        PRODUCTIONS[name] = Production(name, draw, build, arity, weight)
        return make

    return register


def simple(name: str, apply: Callable[..., torch.Tensor], arity: int = 1, weight: float = 1.0) -> None:
    """An operation without arguments or state."""
    operation(name, arity, weight)(lambda world: apply)
