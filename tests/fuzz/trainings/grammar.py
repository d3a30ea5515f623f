"""The productions of whole trainings, by name. They are apart from those of steps, because the worlds differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fuzz.grammar import Draw, Production, nothing

STATEMENTS: dict[str, Production] = {}
BLOCKS: dict[str, Production] = {}


def statement(name: str, draw: Draw = nothing, weight: float = 0.0) -> Callable[..., Any]:
    """Decorates `build(world, statement) -> run`. A statement with a weight may be inserted anywhere in a training;
    the plot places the others."""

    def register(build: Any) -> Any:
        STATEMENTS[name] = Production(name, draw, build, 0, weight)
        return build

    return register


def block(name: str, weight: float = 1.0, draw: Draw = nothing) -> Callable[..., Any]:
    """Decorates `make(clock, *args) -> module`, a module that maps a batch of the usual shape to another one."""

    def register(make: Any) -> Any:
        BLOCKS[name] = Production(name, draw, make, 1, weight)
        return make

    return register
