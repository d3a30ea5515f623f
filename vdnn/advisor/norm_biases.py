"""Finds biases that a batch norm cancels, in the graph of the step, so that functions count as well as modules.

Only a batch norm in training reads the output of the convolution or product, and only that operation reads the bias.
The batch norm subtracts the mean over the batch, and with it any constant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

# The index of the bias among the inputs of the node.
_BIAS_EDGE = {"ConvolutionBackward0": 2, "AddmmBackward0": 0}
_NORMS = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")


class NormBias(NamedTuple):
    """The ids of the two parameters; the caller knows their names. `norm_id` is 0 for a norm without a weight."""

    bias_id: int
    norm_id: int


def norm_biases(loss: torch.Tensor) -> Iterator[NormBias]:
    """Find the biases in the graph of `loss`. Call this before the backward pass, which frees the graph."""
    nodes, consumers = _graph(loss.grad_fn)
    for norm in nodes:
        if norm.name() not in _NORMS or not getattr(norm, "_saved_training", True):
            continue
        made_by = norm.next_functions[0][0]
        if made_by is None or consumers[made_by] != 1 or made_by.name() not in _BIAS_EDGE:
            continue
        bias = made_by.next_functions[_BIAS_EDGE[made_by.name()]][0]
        if bias is None or consumers[bias] != 1 or not hasattr(bias, "variable"):
            continue
        weight: Any = norm.next_functions[1][0]
        yield NormBias(id(bias.variable), id(weight.variable) if hasattr(weight, "variable") else 0)


def _graph(root: Any) -> tuple[list[Any], Counter[Any]]:
    """All nodes, and how many others read each. Python objects of nodes are created on access, and keep their identity
    only while they are held."""
    nodes, consumers, waiting = [], Counter[Any](), [root]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes.append(node)
        for following, _ in node.next_functions:
            if following is not None:
                consumers[following] += 1
                waiting.append(following)
    return nodes, consumers
