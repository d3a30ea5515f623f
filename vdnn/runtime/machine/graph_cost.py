"""The time that a compiled backward takes for the operations of forward that it runs again.

A chain of fusible operations is one kernel: it reads its inputs and writes the results that others read. A chain that
ends in a fusible operation of backward becomes a part of that kernel, and costs its reads alone. All other operations
cost their time by the roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from vdnn.hardware import HardwareProfile
from vdnn.runtime.machine.roofline import operation_ns


class GraphCost:
    """Times of nodes on one card. `hinted` gives the arguments and results of nodes as tensors without data."""

    def __init__(
        self, profile: HardwareProfile, is_fusible: Callable[[fx.Node], bool], hinted: Callable[[Any], Any]
    ) -> None:
        self._profile, self._is_fusible, self._hinted = profile, is_fusible, hinted
        self._alone: dict[fx.Node, int] = {}
        self._traffic: dict[fx.Node, float] = {}

    def alone_ns(self, node: fx.Node) -> int:
        """The time of the operation if nothing is fused with it."""
        if node not in self._alone:
            self._alone[node] = self._operation_ns(node)
        return self._alone[node]

    def recompute_ns(self, recomputed: Collection[fx.Node], in_backward: Collection[fx.Node]) -> int:
        """The time of all `recomputed` nodes in a backward of the nodes `in_backward`, which include them."""
        fusible = {node for node in recomputed if self._is_fusible(node)}
        return round(
            sum(self.alone_ns(node) for node in recomputed if node not in fusible)
            + sum(self._kernel_ns(kernel, in_backward) for kernel in _kernels(fusible))
        )

    def node_ns(self, graph: fx.Graph, is_view: Callable[[fx.Node], bool]) -> dict[fx.Node, float]:
        """The time of each kernel of `graph`, at the last of its nodes. Fusible nodes that depend on each other through
        fusible nodes alone are one kernel. A view is a part of whoever reads it."""
        sources, depths = dict[fx.Node, set[fx.Node]](), dict[fx.Node, int]()
        times: dict[fx.Node, float] = {}
        fused: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            inputs = {root for one in node.all_input_nodes for root in (sources[one] if is_view(one) else {one})}
            sources[node] = inputs
            is_heavy = node.op == "call_function" and not is_view(node) and not self._is_fusible(node)
            depths[node] = max((depths[one] for one in node.all_input_nodes), default=0) + is_heavy
            if is_heavy:
                times[node] = self.alone_ns(node)
            elif node.op == "call_function" and not is_view(node):
                fused.setdefault(depths[node], []).append(node)
        read_by: dict[fx.Node, set[fx.Node]] = {}
        for node, inputs in sources.items():
            if not is_view(node):
                for one in inputs:
                    read_by.setdefault(one, set()).add(node)
        order = {node: place for place, node in enumerate(graph.nodes)}
        for nodes in fused.values():
            for kernel in _connected(nodes, sources):
                read = {one for node in kernel for one in sources[node] if one not in kernel}
                written = [node for node in kernel if not read_by.get(node, set()) <= kernel]
                traffic_ns = sum(self._traffic_ns(one) for one in (*read, *written))
                if traffic_ns:
                    times[max(kernel, key=order.__getitem__)] = traffic_ns + self._profile.kernel_launch_ns
        return times

    def _kernel_ns(self, kernel: set[fx.Node], in_backward: Collection[fx.Node]) -> float:
        read = {one for node in kernel for one in node.all_input_nodes if one not in kernel}
        users = [(node, user) for node in kernel for user in node.users if user not in kernel and user in in_backward]
        written = {node for node, user in users if not self._is_fusible(user)}
        joins = any(self._is_fusible(user) for _, user in users)
        traffic_ns = sum(self._traffic_ns(node) for node in read) + sum(self._traffic_ns(node) for node in written)
        return traffic_ns + (0 if joins and not written else self._profile.kernel_launch_ns)

    def _traffic_ns(self, node: fx.Node) -> float:
        if node not in self._traffic:
            tensors = [one for one in tree_leaves(self._hinted(node)) if isinstance(one, torch.Tensor)]
            moved = sum(one.numel() * one.itemsize for one in tensors)
            rate = self._profile.memory_bytes_per_s * self._profile.bandwidth_efficiency
            self._traffic[node] = moved / rate * 1e9
        return self._traffic[node]

    def _operation_ns(self, node: fx.Node) -> int:
        if isinstance(node.target, torch._ops.OpOverload):
            args, kwargs = self._hinted(node.args), self._hinted(node.kwargs)
            return operation_ns(self._profile, node.target, args, kwargs, self._hinted(node))
        return round(sum(self._traffic_ns(one) for one in (node, *node.all_input_nodes)))


def _connected(nodes: Iterable[fx.Node], sources: Mapping[fx.Node, set[fx.Node]]) -> list[set[fx.Node]]:
    """The parts of `nodes` that read each other."""
    kernel_of: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        kernel = {node}
        for one in sources[node]:
            joined = kernel_of.get(one)
            if joined is not None and joined is not kernel:
                small, kernel = sorted((joined, kernel), key=len)
                kernel |= small
                kernel_of.update(dict.fromkeys(small, kernel))
        kernel_of[node] = kernel
    return list({id(kernel): kernel for kernel in kernel_of.values()}.values())


def _kernels(fusible: Iterable[fx.Node]) -> list[set[fx.Node]]:
    """The connected parts of `fusible`."""
    left, kernels = dict.fromkeys(fusible), []
    while left:
        kernel, pending = set(), [next(iter(left))]
        while pending:
            node = pending.pop()
            if node in left:
                del left[node]
                kernel.add(node)
                pending.extend((*node.all_input_nodes, *node.users))
        kernels.append(kernel)
    return kernels
