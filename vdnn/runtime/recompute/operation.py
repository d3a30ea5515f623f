"""One entry of the table: an operation, where its arguments are found at its autograd node, and how it is done again.

An argument is a tensor that the node saved (`slot`), or what another node put out (`edge`, by place in
next_functions), the slot first. An edge that leads nowhere is an operand without a gradient, or one that is not
there at all: only where `is_absent` knows that it was not there does the operation go without; else the chain ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch

Node = torch.autograd.graph.Node


class Cost(Enum):
    """What doing it again costs."""

    FREE = auto()  # a view: nothing is computed and nothing allocated
    CHEAP = auto()  # a pass or two over its operands
    EXPENSIVE = auto()  # convolution, matrix product, attention


class Layout(Enum):
    """What an operation has to do with the strides of its inputs. See layouts.py."""

    READ = auto()  # its bits may depend on them
    IGNORED = auto()  # they may not: it copies, compares, or makes its inputs contiguous first
    EXACT = auto()  # they may not, where each number is rounded once: real, and with nothing scaled
    ASKED = auto()  # a copy, which may have been asked for another memory format
    CONTIGUOUS = auto()  # ignored, and what it makes is contiguous


class Call(NamedTuple):
    """What an operation is done with besides tensors: its scalars, and the output that is wanted, as it was made."""

    scalars: tuple[Any, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    output_nr: int


class Argument(NamedTuple):
    """Where a tensor is found. See the head of this file."""

    slot: str | None = None
    edge: int | None = None
    is_absent: Callable[[Node], bool] | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """`run(call, *tensors)` does it again. `scalars` are read off the node, in order; `facts` were noted there by
    whoever called the operation (see node_notes), and without them the chain ends.

    With `takes_every_edge` the arguments are all that the node leads to; with `makes_every_output` it makes the output
    that the call names, and else the first one. `may_be_in_place`: it may have overwritten its first argument, which
    the name of its node does not say.
    """

    name: str
    run: Callable[..., torch.Tensor]
    arguments: tuple[Argument, ...] = ()
    scalars: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    cost: Cost = Cost.CHEAP
    takes_every_edge: bool = False
    makes_every_output: bool = False
    may_be_in_place: bool = False
    layout: Layout = Layout.READ

    @property
    def must_be_seen(self) -> bool:
        """Whether only a look at the settings of torch while it ran will do: these always save something, and what they
        put out depends on the settings most."""
        return self.cost is Cost.EXPENSIVE or "norm" in self.name

    @property
    def length(self) -> int:
        """What it adds to a chain."""
        return 0 if self.cost is Cost.FREE else 1


# By the name of the node; a function where the node decides which operation it was, or that it is none of ours.
Choice = Callable[[Node], "Operation | None"]
Table = dict[str, "Operation | Choice"]


def edge(place: int) -> Argument:
    return Argument(edge=place)


def saved(slot: str, place: int | None = None) -> Argument:
    """Saved by the node, or else found at that edge."""
    return Argument(slot, place)


FIRST = (edge(0),)


def unary(name: str, run: Callable[..., torch.Tensor], *scalars: str, slot: str | None = "self") -> Operation:
    """Of one tensor, which some of them save."""
    return Operation(name, run, (Argument(slot, 0),), scalars)


def view(name: str, run: Callable[..., torch.Tensor], *scalars: str) -> Operation:
    return Operation(name, run, FIRST, scalars, cost=Cost.FREE, layout=Layout.IGNORED)


def pieces(name: str, run: Callable[..., torch.Tensor], *scalars: str) -> Operation:
    """A view for each output."""
    return Operation(name, run, FIRST, scalars, cost=Cost.FREE, makes_every_output=True, layout=Layout.IGNORED)
