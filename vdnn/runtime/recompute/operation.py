"""One entry of the table: an operation, how to find its arguments from its autograd node, and how to run it.

An argument is a tensor that the node saved (`slot`), or else the output of another node (`edge`, an index into
next_functions). An edge that leads to no node is an operand without a gradient, or an operand that was not given. If
`is_absent` confirms that it was not given, the operation runs without it; otherwise the chain ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, NamedTuple

import torch

Node = torch.autograd.graph.Node
ALPHA = ("alpha",)  # the scalars of a sum with a scaled operand


class Cost(Enum):
    """The cost of running an operation again."""

    FREE = auto()  # a view: nothing is computed and nothing allocated
    CHEAP = auto()  # a pass or two over its operands
    EXPENSIVE = auto()  # convolution, matrix product, attention


class Layout(Enum):
    """The dependence of an operation's result on the strides of its inputs. See layouts.py."""

    READ = auto()  # its bits may depend on them
    IGNORED = auto()  # its bits do not: it compares, or makes its inputs contiguous first
    EXACT = auto()  # its bits do not if each number is rounded once: real numbers, no scaled operand
    COPIED = auto()  # ignored: it copies numbers
    ASKED = auto()  # a copy, which may have been made in another memory format
    CONTIGUOUS = auto()  # ignored, and the result is contiguous


class Call(NamedTuple):
    """The input of an operation besides tensors: its scalars, and the properties of the original output."""

    scalars: tuple[Any, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    output_nr: int


class Argument(NamedTuple):
    """Tells how to find a tensor at the node. See the docstring of this file."""

    slot: str | None = None
    edge: int | None = None
    is_absent: Callable[[Node], bool] | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """`run(call, *tensors)` runs it again. `scalars` are read from the node, in order. `facts` were noted on the node
    when the operation was called (see node_notes); without them the chain ends.

    With `takes_every_edge` the arguments are the outputs at all of the node's edges. With `makes_every_output` it makes
    the output that the call names, otherwise the first. `may_be_in_place`: it may have overwritten its first argument;
    the node's name does not tell. `on_cudnn`: on a GPU, cuDNN chooses the algorithm. `is_by_row`: each number of the
    result depends on one row of the operands at most, so a trial holds for other sizes too (see shapeless.py); the
    scalars in `sizes` are sizes or positions.
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
    on_cudnn: bool = False
    is_by_row: bool = False
    sizes: tuple[str, ...] = ()

    @property
    def must_be_seen(self) -> bool:
        """True if torch's settings have to be read while the operation runs. These operations always save something,
        and their output depends on the settings most."""
        return self.cost is Cost.EXPENSIVE or "norm" in self.name

    def rounds_once(self, node: Node) -> bool:
        """True if no setting of torch changes a bit of the result but that of denormals: each number is the exact one,
        rounded, whatever kernel computes it. A sum with a scaled operand may be rounded once or twice."""
        if self.layout is Layout.EXACT:
            return self.scalars != ALPHA or node._saved_alpha == 1  # type: ignore[attr-defined]
        return self.layout in (Layout.ASKED, Layout.COPIED)

    @property
    def length(self) -> int:
        """The number of operations that it adds to a chain."""
        return 0 if self.cost is Cost.FREE else 1


class Step(NamedTuple):
    """One operation. `inputs` and `dying` are indices of values: first the given ones, then one for each step. An input
    of -1 is None. A value in `dying` is not read by later steps."""

    operation: Operation
    call: Call
    inputs: tuple[int, ...]
    dying: tuple[int, ...]


# By the name of the node. A function chooses the operation from the node, or returns None if it is not in the table.
Choice = Callable[[Node], "Operation | None"]
Table = dict[str, "Operation | Choice"]


def edge(index: int) -> Argument:
    return Argument(edge=index)


def saved(slot: str, edge: int | None = None) -> Argument:
    """A tensor that the node saved, or else the output at that edge."""
    return Argument(slot, edge)


FIRST = (edge(0),)


def unary(name: str, run: Callable[..., torch.Tensor], *scalars: str, slot: str | None = "self") -> Operation:
    """An operation on one tensor, which the node may save."""
    return Operation(name, run, (Argument(slot, 0),), scalars)


def view(name: str, run: Callable[..., torch.Tensor], *scalars: str, sizes: tuple[str, ...] = ()) -> Operation:
    return Operation(name, run, FIRST, scalars, cost=Cost.FREE, layout=Layout.IGNORED, is_by_row=True, sizes=sizes)


def pieces(name: str, run: Callable[..., torch.Tensor], *scalars: str, sizes: tuple[str, ...] = ()) -> Operation:
    """An operation whose outputs are views."""
    return replace(view(name, run, *scalars, sizes=sizes), makes_every_output=True)
