"""Backwards inside of a backward that name leaves as a graph had saved them, as adjoints of differential equations do.

torch unpacks a saved leaf as another tensor, whose gradients arrive at the node that the leaf had when it was saved. A
leaf that moved since has another node, which only the leaf itself can be asked for. So such inputs are replaced by
their leaves before backward_inputs looks for nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from vdnn.runtime.torch_internals.backward_ends import in_backward
from vdnn.runtime.torch_internals.backward_inputs import run_with_inputs

_INPUTS = 4  # the place among the arguments of torch's engine


def run_with_leaves(run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Runs a backward that names its inputs or makes a graph, as torch's engine does."""
    if in_backward():
        inputs = tuple(map(_leaf_of, arguments[_INPUTS]))
        arguments = (*arguments[:_INPUTS], inputs, *arguments[_INPUTS + 1 :])
    return run_with_inputs(run, *arguments, **options)


def _leaf_of(one: Any) -> Any:
    """The parameter that was unpacked as `one`, or `one`."""
    if type(one) is not torch.Tensor or not one.is_leaf or not one.requires_grad:
        return one
    if torch._C._functorch.is_functorch_wrapped_tensor(one):
        return one
    node: Any = get_gradient_edge(one).node
    return node.variable if isinstance(node.variable, torch.nn.Parameter) else one
