"""Pre-images of the inputs that a compiled region writes to, so that backward never reads the written value.

A partitioner takes an input of forward as available in backward, for no bytes. That is wrong of an input that forward
writes to: when backward runs, it holds the new value, and what is recomputed from it is applied a second time. Before a
joint graph is cut, everything that reads such an input reads a clone of it that may not be recomputed. A cut then saves
this clone, or something computed from it, and counts its bytes. A clone that no cut saves is removed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

_SUFFIX = "_before_its_write"
# FSDP2 gives the storage of a parameter back between two uses: there is nothing to clone when the graph begins.
_RESIZES = "resize_storage_bytes_"


def keep_preimages(joint: fx.Graph, num_fwd_outputs: int) -> None:
    """Lets all that reads an input that forward writes to read a clone of it, which a cut has to save."""
    output = joint.output_node()
    for given in list(_written(joint, num_fwd_outputs)):
        readers = [user for user in given.users if user is not output and _reads_values(user, given)]
        name = given.name + _SUFFIX
        with joint.inserting_before(_first_operation(joint)):
            clone = joint.create_node("call_function", torch.ops.aten.clone.default, (given,), name=name)
        clone.meta["val"] = torch.ops.aten.clone.default(given.meta["val"])  # fake as well, over a storage of its own
        clone.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for reader in readers:
            _read_instead(reader, given, clone)
        returned: Any = output.args[0]
        ahead, behind = returned[:num_fwd_outputs], returned[num_fwd_outputs:]
        output.args = (type(returned)([*ahead, *_replaced(tuple(behind), given, clone)]), *output.args[1:])


def remove_unsaved_preimages(forward: fx.GraphModule) -> None:
    """Lets forward read its inputs themselves where backward does not take their clones."""
    graph = forward.graph
    for node in list(graph.nodes):
        if node.name.endswith(_SUFFIX) and node.op == "call_function" and graph.output_node() not in node.users:
            given: Any = node.args[0]
            node.replace_all_uses_with(given)
            graph.erase_node(node)
    forward.recompile()


def _written(joint: fx.Graph, num_fwd_outputs: int) -> Iterator[fx.Node]:
    """The inputs whose values forward writes to: in the graph, or by torch behind it, from an output."""
    returned = set(_mutated_inputs(joint, num_fwd_outputs))
    for node in joint.find_nodes(op="placeholder"):
        if not isinstance(node.meta.get("val"), torch.Tensor) or any(_RESIZES in str(one.target) for one in node.users):
            continue
        if node.meta.get("desc") in returned or any(_writes_in_forward(user, node) for user in node.users):
            yield node


def _mutated_inputs(joint: fx.Graph, num_fwd_outputs: int) -> Iterator[Any]:
    """Descriptions of the inputs into which torch copies outputs."""
    described: Any = joint.output_node().meta.get("desc") or ()
    for one in list(described)[:num_fwd_outputs]:
        given = _written_by(one)
        if given is not None:
            yield given


def _written_by(described: Any) -> Any:
    """The description of the input into which this output is copied, part by part where it is a part of a subclass."""
    from torch._functorch._aot_autograd import descriptors

    if isinstance(described, descriptors.InputMutationAOTOutput):
        return described.mutated_input
    if isinstance(described, descriptors.SubclassGetAttrAOTOutput):
        base = _written_by(described.base)
        return None if base is None else descriptors.SubclassGetAttrAOTInput(base, described.attr)
    return None


def _writes_in_forward(user: fx.Node, given: fx.Node) -> bool:
    return user.meta.get("partitioner_tag") != "must_be_in_backward" and given in _written_arguments(user)


def _written_arguments(node: fx.Node) -> list[Any]:
    """The arguments of a node that it writes to, as its schema says."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found = []
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.is_write:
            found.append(node.args[place] if place < len(node.args) else node.kwargs.get(argument.name))
    return found


def _reads_values(user: fx.Node, given: fx.Node) -> bool:
    """False for a node that only writes to the input, and for one that only reads its sizes."""
    written = _written_arguments(user)
    if given in written and sum(one is given for one in (*user.args, *user.kwargs.values())) == 1:
        return False
    return not isinstance(user.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int))


def _read_instead(reader: fx.Node, given: fx.Node, clone: fx.Node) -> None:
    schema = reader.target._schema.arguments if isinstance(reader.target, torch._ops.OpOverload) else ()
    written = {place for place, one in enumerate(schema) if one.is_write}
    reader.args = tuple(
        one if place in written else _replaced(one, given, clone) for place, one in enumerate(reader.args)
    )
    names = {schema[place].name for place in written}
    reader.kwargs = {
        name: one if name in names else _replaced(one, given, clone) for name, one in reader.kwargs.items()
    }


def _replaced(argument: Any, given: fx.Node, clone: fx.Node) -> Any:
    return fx.map_arg(argument, lambda one: clone if one is given else one)


def _first_operation(graph: fx.Graph) -> fx.Node:
    found: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return found
