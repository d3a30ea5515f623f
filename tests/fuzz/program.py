"""A random training program as plain data: a tree of statements, drawn from a seed, that prints as a listing.

A statement names a production of the grammar, the slots that it reads and writes, and its arguments. A slot that no
statement has written reads as the input, also if the minimizer dropped that statement. So every part of a program is
itself a program, which the minimizer depends on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

STEPS = 8
SETTLED_STEPS = 20  # for modes whose steps settle
STEPS_WITHOUT_PLAN = 6  # for modes without a recording; changing numbers and late writes begin in steps 3 to 5
INPUT = 0  # the slot of a step's input


class When(NamedTuple):
    """Selects the steps from `first` on with `step % period == phase`."""

    period: int = 1
    phase: int = 0
    first: int = 0

    @property
    def first_step(self) -> int:
        return self.first + (self.phase - self.first) % self.period

    def __str__(self) -> str:
        said = [f"step % {self.period} == {self.phase}"] if self.period > 1 else []
        said += [f"step >= {self.first}"] if self.first else []
        return f"    if {' and '.join(said)}" if said else ""


ALWAYS = When()


class Statement(NamedTuple):
    name: str
    out: int = -1
    ins: tuple[int, ...] = ()
    args: tuple[Any, ...] = ()
    when: When = ALWAYS
    body: tuple[Statement, ...] = ()


class Program(NamedTuple):
    seed: int
    mode: str
    body: tuple[Statement, ...]

    def listing(self) -> str:
        lines = [f"program {self.seed}, {self.mode}"]
        lines += _lines(self.body, "  ")
        return "\n".join(lines)

    def names(self) -> set[str]:
        return {one.name for one in flattened(self.body)}


def flattened(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Yields the statements in running order."""
    for one in body:
        yield from flattened(one.body)
        yield one


def _lines(body: tuple[Statement, ...], indent: str) -> Iterator[str]:
    for one in body:
        arguments = ", ".join([*(f"v{slot}" for slot in one.ins), *(repr(arg) for arg in one.args)])
        out = f"v{one.out} = " if one.out >= 0 else ""
        colon = ":" if one.body else ""
        yield f"{indent}{out}{one.name}({arguments}){colon}{one.when}"
        yield from _lines(one.body, indent + "    ")


def without(body: tuple[Statement, ...], index: int) -> tuple[Statement, ...]:
    """The body without one statement, which is given by its number in the listing."""
    return _pruned(body, [index])


def _pruned(body: tuple[Statement, ...], left: list[int]) -> tuple[Statement, ...]:
    kept = []
    for one in body:
        left[0] -= 1
        if left[0] == -1:
            continue
        kept.append(one._replace(body=_pruned(one.body, left)) if one.body else one)
    return tuple(kept)


def unwrapped(body: tuple[Statement, ...], index: int) -> tuple[Statement, ...]:
    """The body with one block replaced by its contents. The block is given by its number in the listing."""
    return _opened(body, [index])


def _opened(body: tuple[Statement, ...], left: list[int]) -> tuple[Statement, ...]:
    kept: list[Statement] = []
    for one in body:
        left[0] -= 1
        if left[0] == -1:
            kept += one.body
            left[0] -= sum(1 for _ in flattened(one.body))
        else:
            kept.append(one._replace(body=_opened(one.body, left)) if one.body else one)
    return tuple(kept)
