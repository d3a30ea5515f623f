"""Backwards that name their inputs: `torch.autograd.grad(loss, inputs)` and `loss.backward(inputs=inputs)`.

torch asks a leaf for the node at which its gradient arrives. It makes a new node when the data of the leaf are put on
another device, so for a leaf that moved since its use it finds none of the graph: `grad` raises, and `backward`
accumulates nothing without a word. Such nodes are found in the graph here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from vdnn.runtime.torch_internals.backward_ends import in_backward

_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_moved: list[Callable[[torch.Tensor], bool]] = []  # of each owner of leaves: may the data of this one have moved?
_before_graphs: list[Callable[[], object]] = []  # of each owner: called before a backward whose gradients have a graph


def find_inputs(
    may_have_moved: Callable[[torch.Tensor], bool], before_graph_of_gradients: Callable[[], object]
) -> Callable[[], None]:
    """Finds the nodes of leaves for which `may_have_moved` is true, until the returned function is called.

    `before_graph_of_gradients` is called before `backward(create_graph=True)`. torch then copies each gradient to where
    the data of its leaf are, and the copy is a part of the graph: two gradients that a host and a device compute at the
    same time are added in the order in which they come.
    """
    _moved.append(may_have_moved)
    _before_graphs.append(before_graph_of_gradients)

    def no_longer() -> None:
        _moved.remove(may_have_moved)
        _before_graphs.remove(before_graph_of_gradients)

    return no_longer


def run_with_inputs(run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Runs a backward that names its inputs or makes a graph, as torch's engine does."""
    outputs, gradients, retains, creates, inputs, *rest = arguments
    if in_backward():
        inputs = tuple(map(_leaf_of, inputs))
    if creates and options.get("accumulate_grad"):
        for before in list(_before_graphs):
            before()
    moved = [one for one in inputs if _may_have_moved(one)]
    if not moved:
        return run(outputs, gradients, retains, creates, inputs, *rest, **options)
    found = _nodes_of(moved, outputs)
    edges = [[GradientEdge(node, 0) for node in found.get(id(one), ())] or [one] for one in inputs]
    taken = run(outputs, gradients, retains, creates, tuple(chain.from_iterable(edges)), *rest, **options)
    if options.get("accumulate_grad"):
        return taken
    parts = iter(taken)
    return tuple(_sum([next(parts) for _ in one]) for one in edges)


def _leaf_of(one: Any) -> Any:
    """The parameter that a custom function's backward got as `one` from its saved tensors, or `one`. torch unpacks a
    saved leaf as another tensor, which has the node that the leaf had when it was saved. The backward of an adjoint
    names such tensors."""
    if type(one) is not torch.Tensor or not one.is_leaf or not one.requires_grad:
        return one
    if torch._C._functorch.is_functorch_wrapped_tensor(one):
        return one
    node: Any = get_gradient_edge(one).node
    return node.variable if isinstance(node.variable, torch.nn.Parameter) else one


def _may_have_moved(one: object) -> bool:
    return isinstance(one, torch.Tensor) and one.is_leaf and any(asks(one) for asks in _moved)


def _nodes_of(leaves: list[torch.Tensor], outputs: Iterable[torch.Tensor | GradientEdge]) -> dict[int, list[Node]]:
    """The nodes at which gradients of the leaves arrive, by the id of the leaf."""
    nodes: dict[int, list[Node]] = {}
    wanted = {id(one) for one in leaves}
    waiting = [one.node if isinstance(one, GradientEdge) else one.grad_fn for one in outputs]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if node is None:
            continue
        if type(node) is _AccumulateGrad and id(node.variable) in wanted:
            nodes.setdefault(id(node.variable), []).append(node)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return nodes


def _sum(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    """A leaf has at most two nodes, because it no longer moves after its second use. So the order does not matter."""
    there = [one for one in parts if one is not None]
    return functools.reduce(operator.add, there) if there else None
