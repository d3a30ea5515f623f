"""Puts the moves of a plan into the two graphs of a compiled region, as the operators of graph_copies.

A value is copied to the host as soon as it is made. Forward waits for that copy where the plan releases the value, and
returns the host's tensor in its place. Backward takes that tensor, issues the reload where the plan says so, and waits
for it before the first use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from vdnn.runtime.machine.graph_step import GraphStep
from vdnn.runtime.storage.graph_copies import offload  # importing it registers the operators
from vdnn.step.plan import Plan

_KEPT_META = ("saved_tensor_with_no_vc_check",)


class RegionMove(NamedTuple):
    """A value that leaves: its name, and the points of its release, its reload and its first use in backward."""

    name: str
    nbytes: int
    release_point: int
    reload_point: int
    use_point: int


def moves_of(step: GraphStep, plan: Plan) -> list[RegionMove]:
    """The moves of a plan, in the order of the reloads. A value leaves before the end of forward, and comes back behind
    its beginning of backward."""
    found = []
    for lifetime, storage, planned in zip(step.recording.lifetimes, step.storages, plan.lifetimes, strict=True):
        for absence in planned.absences[:1]:
            use = lifetime.uses[0]
            if absence.release_point >= use:
                continue
            reload = use if absence.reload_point is None else absence.reload_point
            release = min(max(absence.release_point, lifetime.free_point), step.boundary)
            reload = min(max(reload, step.boundary + 1), use)
            found.append(RegionMove(storage.names[0], storage.nbytes, release, reload, use))
    return sorted(found, key=lambda move: (move.reload_point, move.use_point))


def put_into(forward: fx.GraphModule, backward: fx.GraphModule, step: GraphStep, moves: Iterable[RegionMove]) -> None:
    """Changes both graphs. Nothing that they compute changes."""
    moves = list(moves)
    ahead, behind = list(forward.graph.nodes), list(backward.graph.nodes)
    for move in moves:
        _offload(forward.graph, ahead, step, move)
    # At one place the wait comes first, and then the reloads in their order.
    places = [(step.places[move.use_point].node, 0, order, move) for order, move in enumerate(moves)]
    places += [(step.places[move.reload_point].node, 1, order, move) for order, move in enumerate(moves)]
    hosts = {move.name: _host_of(backward.graph, move) for move in moves}
    issued: dict[str, fx.Node] = {}
    pending: dict[str, tuple[fx.Node, fx.Node]] = {}
    for place, is_reload, _, move in sorted(places, key=lambda one: one[:3]):
        before = _behind_inputs(behind, place - len(ahead))
        value, host = hosts[move.name]
        if is_reload and move.name not in pending:
            issued[move.name] = _reload(backward.graph, before, value, host)
        elif not is_reload:
            if move.name not in issued:
                issued[move.name] = _reload(backward.graph, before, value, host)
            reloaded = issued[move.name]
            waited = _wait(backward.graph, before, reloaded, host)
            pending[move.name] = (value, waited)
    for value, waited in pending.values():
        value.replace_all_uses_with(waited)
        backward.graph.erase_node(value)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def _offload(graph: fx.Graph, nodes: list[fx.Node], step: GraphStep, move: RegionMove) -> None:
    value = next(node for node in nodes if node.name == move.name)
    index = nodes.index(value)
    with graph.inserting_after(value):
        host = graph.call_function(torch.ops.vdnn.offload.default, (value,))
    host.meta["val"] = _host_value(value.meta["val"])
    place = step.places[move.release_point]
    before = nodes[max(place.node + place.side, index + 1)]
    waited = _wait(graph, before, host, value, _host_name(move))
    waited.meta.update({key: value.meta[key] for key in _KEPT_META if key in value.meta})
    output: Any = graph.output_node()
    output.args = (type(output.args[0])(waited if one is value else one for one in output.args[0]), *output.args[1:])


def _host_of(graph: fx.Graph, move: RegionMove) -> tuple[fx.Node, fx.Node]:
    """The input of backward that was the value, and the new one that is its host tensor."""
    value = next(node for node in graph.nodes if node.op == "placeholder" and node.name == move.name)
    with graph.inserting_after(value):
        host = graph.placeholder(_host_name(move))
    host.meta.update(value.meta)
    host.meta["val"] = _host_value(value.meta["val"])
    host.meta.pop("tensor_meta", None)
    return value, host


def _reload(graph: fx.Graph, before: fx.Node, value: fx.Node, host: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        node = graph.call_function(torch.ops.vdnn.reload.default, (host, value.meta["val"].device))
    node.meta["val"] = value.meta["val"]
    return node


def _host_name(move: RegionMove) -> str:
    return f"{move.name}_on_host"


def _wait(graph: fx.Graph, before: fx.Node, copied: fx.Node, source: fx.Node, name: str | None = None) -> fx.Node:
    with graph.inserting_before(before):
        node = graph.create_node("call_function", torch.ops.vdnn.wait.default, (copied, source), name=name)
    node.meta["val"] = copied.meta["val"]
    return node


def _behind_inputs(nodes: list[fx.Node], index: int) -> fx.Node:
    return next(node for node in nodes[index:] if node.op != "placeholder")


def _host_value(value: torch.Tensor) -> torch.Tensor:
    host: torch.Tensor = offload(value)  # of a fake tensor it is fake, too
    return host
