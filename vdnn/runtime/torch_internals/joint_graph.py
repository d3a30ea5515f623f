"""The partitioner of torch.compile: joint graphs, what forward saves, and torch's own ways to choose it.

AOTAutograd traces forward and backward into one joint graph, and a partitioner cuts it in two. Every cut here is made
by torch's min-cut partitioner; this module says under which options, and reads what a cut holds. It needs torch 2.13:
require_partitioner() raises an error where a part of it is missing. Sizes that are symbols count at their hint.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy

from vdnn.errors import TorchMissingError

try:
    from torch._functorch import config as functorch_config
    from torch._functorch import partitioners
    from torch._functorch._activation_checkpointing.knapsack import dp_knapsack
    from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
    from torch._functorch.partitioners import (
        MinCutOptions,
        NodeInfo,
        OpTypes,
        get_default_op_list,
        min_cut_rematerialization_partition,
        solve_min_cut,
    )
    from torch._inductor import config as inductor_config
    from torch._inductor.custom_graph_pass import CustomKnapsackSolver, CustomPartitionerFn
    from torch.fx.experimental.symbolic_shapes import optimization_hint
    from torch.utils.checkpoint import CheckpointPolicy

    _missing = ""
except ImportError as error:
    _missing = str(error)
    CustomKnapsackSolver = CustomPartitionerFn = object  # type: ignore[misc, assignment]

NEEDED = "torch>=2.13"
# Used where a symbol has no hint, as torch's own partitioner does.
_UNKNOWN = 4096
# More than nothing, so that torch asks the solver, and less than any cut leaves.
_SOLVER_DECIDES = 1e-12


@dataclass(frozen=True, slots=True)
class RegionBytes:
    """The bytes of a region between its forward and its backward, each storage once: its inputs and outputs, and what
    is saved in addition."""

    inputs_and_outputs_bytes: int
    saved_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of both."""
        return self.inputs_and_outputs_bytes + self.saved_bytes


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """A storage that forward saves beside inputs and outputs: its tensors by name, as forward returns them and backward
    takes them. `can_leave`: one tensor covers it, so that copying that tensor copies the storage."""

    names: tuple[str, ...]
    nbytes: int
    can_leave: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """A joint graph in two modules, with what it holds and the nodes of backward that forward has run before."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    held: RegionBytes
    recomputed: frozenset[fx.Node]
    saved: tuple[SavedStorage, ...]


@dataclass(frozen=True, slots=True)
class CutTrial:
    """A cut that was tried: the bytes that it holds, the nodes that it recomputes, and the nodes in backward."""

    held: RegionBytes
    recomputed: frozenset[fx.Node]
    in_backward: frozenset[fx.Node]


# (what torch saves, a function that tries a set of it as recomputed) -> the set to recompute
Chooser = Callable[[Sequence[fx.Node], Callable[[frozenset[fx.Node]], CutTrial]], frozenset[fx.Node]]


def require_partitioner() -> None:
    """Raises TorchMissingError if this torch lacks a part of the partitioner that is used here."""
    if _missing:
        raise TorchMissingError(found=f"torch {torch.__version__} is installed ({_missing})", needed=NEEDED)


def other_partitioner() -> str:
    """The setting by which another partitioner or share is chosen for the whole process, or "" if there is none."""
    if inductor_config.custom_partitioner_fn is not None:
        return "torch._inductor.config.custom_partitioner_fn"
    if functorch_config.activation_memory_budget != 1:
        return "torch._functorch.config.activation_memory_budget"
    return ""


def region_name() -> str:
    """The name by which torch's logs call the region that is compiled now, as in "model__0_joint_1"."""
    return str(get_aot_graph_name())


def captures_cuda_graphs() -> bool:
    """True if this compilation records CUDA graphs."""
    return bool(inductor_config.triton.cudagraphs)


def is_fusible(node: fx.Node) -> bool:
    """True if Inductor fuses the operation with its neighbours."""
    return bool(_operations().is_fusible(node))


def is_view(node: fx.Node) -> bool:
    """True if the result of the operation is a view of its argument."""
    is_one = node.target is operator.getitem or getattr(node.target, "is_view", False)
    return bool(is_one or _operations().is_view(node))


@functools.cache
def _operations() -> OpTypes:
    """Torch's lists of operations, which it makes anew at each call: that takes milliseconds."""
    return get_default_op_list()


def hinted(tree: Any) -> Any:
    """`tree`, an argument or a result of a node, with nodes and tensors as meta tensors of their hinted sizes."""
    return tree_map(_hinted_leaf, tree)


def min_cut(joint: fx.GraphModule, inputs: Any, num_fwd_outputs: int, options: dict[str, Any]) -> Cut:
    """The cut that torch makes by itself. `joint` stays as it is."""
    return _cut(joint, inputs, num_fwd_outputs, options, {})


def lean_cut(joint: fx.GraphModule, inputs: Any, num_fwd_outputs: int, options: dict[str, Any]) -> Cut:
    """Torch's cut with fusible operations recomputed, though backward reads them late or from memory."""
    return _cut(joint, inputs, num_fwd_outputs, options, _LEAN)


def aggressive_cut(joint: fx.GraphModule, inputs: Any, num_fwd_outputs: int, options: dict[str, Any]) -> Cut:
    """Torch's cut with everything recomputed but random operations, reductions and what computes much."""
    return _cut(joint, inputs, num_fwd_outputs, options, {"aggressive_recomputation": True}, pinned=_is_random)


def budgeted_cut(
    joint: fx.GraphModule, inputs: Any, num_fwd_outputs: int, options: dict[str, Any], share: float
) -> Cut:
    """Torch's cut under `activation_memory_budget`, by its knapsack and its own estimate of times."""
    return _cut(joint, inputs, num_fwd_outputs, options, {"activation_memory_budget": share}, pinned=_is_random)


def chosen_cut(
    joint: fx.GraphModule, inputs: Any, num_fwd_outputs: int, options: dict[str, Any], chooser: Chooser
) -> Cut:
    """The cut for which `chooser` says which of the operations that torch saves are recomputed, products included.
    Random operations are never among them, unless a checkpoint asks for it: torch restores their state only there.
    Torch does not ask the chooser if it saves less than the inputs of the region take."""
    solver = _Solver(chooser, num_fwd_outputs)
    changes = {"activation_memory_budget": _SOLVER_DECIDES, "activation_memory_budget_solver": solver}
    return _cut(joint, inputs, num_fwd_outputs, options, changes, pinned=_is_random)


_LEAN = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}


class Partitioner(CustomPartitionerFn):
    """The class that Inductor takes as a partitioner, or a plain class where torch has none."""


class _Solver(CustomKnapsackSolver):
    """Hands torch's question, which of the banned nodes to recompute, to a chooser that can try its answers."""

    def __init__(self, chooser: Chooser, num_fwd_outputs: int) -> None:
        self._chooser, self._num_fwd_outputs = chooser, num_fwd_outputs

    def __call__(
        self,
        memory: list[float],
        joint_graph: fx.Graph,
        max_memory: float,
        node_info: NodeInfo,
        all_recomputable_banned_nodes: list[fx.Node],
    ) -> tuple[list[int], list[int]]:
        banned = all_recomputable_banned_nodes
        ends = [*node_info.inputs, *_outputs(joint_graph)[: self._num_fwd_outputs]]
        options = MinCutOptions(False, False, False, False, functorch_config.ban_recompute_reductions)

        def trial(recomputed: frozenset[fx.Node]) -> CutTrial:
            dont_ban = torch.utils._ordered_set.OrderedSet(node for node in banned if node in recomputed)
            saved, _ = solve_min_cut(joint_graph, node_info, options, dont_ban)
            again = _recomputed(node_info, saved)
            return CutTrial(_held(ends, saved), again, again | frozenset(node_info.required_bw_nodes))

        chosen = self._chooser(banned, trial)
        places = range(len(banned))
        return [i for i in places if banned[i] not in chosen], [i for i in places if banned[i] in chosen]

    def uuid(self) -> str:
        """Constant, because torch caches by the partitioner that this solver works for."""
        return "vdnn"


def knapsack(weights: Sequence[float], values: Sequence[float], capacity: float) -> list[int]:
    """The positions that torch's dynamic program does not pick under `capacity`, and would recompute."""
    return list(dp_knapsack(list(weights), list(values), capacity)[2])


def _cut(
    joint: fx.GraphModule,
    inputs: Any,
    num_fwd_outputs: int,
    options: dict[str, Any],
    changes: dict[str, Any],
    pinned: Callable[[fx.Node], bool] | None = None,
) -> Cut:
    # A copy, because the partitioner writes to the graph and to the meta of its nodes.
    module = fx.GraphModule(joint, _copy(joint.graph))
    module.meta.update(joint.meta)
    keep_preimages(module.graph, num_fwd_outputs)
    if pinned is not None:
        for node in module.graph.nodes:
            if "recompute" not in node.meta and pinned(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with functorch_config.patch(changes), _saves_tensors():
        forward, backward = min_cut_rematerialization_partition(
            module, inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
    remove_unsaved_preimages(forward)
    outputs = _outputs(forward.graph)
    ends = [*forward.graph.find_nodes(op="placeholder"), *outputs[:num_fwd_outputs]]
    before = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    again = frozenset(node for node in backward.graph.nodes if node.op == "call_function" and node.name in before)
    return Cut(forward, backward, _held(ends, outputs[num_fwd_outputs:]), again, _saved_storages(ends, outputs))


@contextlib.contextmanager
def _saves_tensors() -> Iterator[None]:
    """While entered, torch saves the tensors of an operation with several results, and never the tuple. If no choice is
    left, its min-cut saves values that are marked as MUST_SAVE unchanged, and then fails at a dropout."""
    choose = partitioners.choose_saved_values_set

    def chosen(*arguments: Any, **named: Any) -> list[fx.Node]:
        return list(dict.fromkeys(one for node in choose(*arguments, **named) for one in _tensors_of(node)))

    partitioners.choose_saved_values_set = chosen
    try:
        yield
    finally:
        partitioners.choose_saved_values_set = choose


def _tensors_of(node: fx.Node) -> Iterator[fx.Node]:
    """`node`, or the elements of its result that are used."""
    if not isinstance(node.meta.get("val"), (tuple, list)):
        yield node
        return
    for user in node.users:
        if user.target is operator.getitem:
            yield from _tensors_of(user)


def _copy(graph: fx.Graph) -> fx.Graph:
    copied, places = fx.Graph(), dict[fx.Node, fx.Node]()
    copied.output(copied.graph_copy(graph, places))
    copied.output_node().meta.update(graph.output_node().meta)
    return copied


def _outputs(graph: fx.Graph) -> list[Any]:
    found: Any = graph.output_node().args[0]
    return list(found)


def _recomputed(node_info: NodeInfo, saved: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """The nodes of forward that backward runs again if it is given `saved`."""
    given, found = set(saved), set()
    pending = [one for node in node_info.required_bw_nodes for one in node.all_input_nodes]
    while pending:
        node = pending.pop()
        if node in given or node in found or node.op == "placeholder" or node in node_info.required_bw_nodes:
            continue
        found.add(node)
        pending.extend(node.all_input_nodes)
    return frozenset(found)


def _held(ends: Iterable[Any], saved: Iterable[Any]) -> RegionBytes:
    at_ends = _storages(ends)
    beyond = {key: size for key, size in _storages(saved).items() if key not in at_ends}
    return RegionBytes(sum(at_ends.values()), sum(beyond.values()))


def _saved_storages(ends: Iterable[Any], saved: Iterable[Any]) -> tuple[SavedStorage, ...]:
    at_ends, groups = _storages(ends), dict[int, list[fx.Node]]()
    for node in saved:
        for key in _storages([node]):
            groups.setdefault(key, []).append(node)
    sizes = {key: size for nodes in groups.values() for key, size in _storages(nodes).items()}
    on_gpu = any(_is_on(node, "cuda") for node in (*ends, *saved))
    return tuple(
        SavedStorage(
            tuple(node.name for node in nodes),
            sizes[key],
            len(nodes) == 1 and _is_on(nodes[0], "cuda" if on_gpu else "cpu") and _extent_bytes(nodes[0]) == sizes[key],
        )
        for key, nodes in groups.items()
        if key not in at_ends
    )


def _is_on(node: Any, device_type: str) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.device.type == device_type


def _extent_bytes(node: fx.Node) -> int:
    return int(hinted(node).untyped_storage().nbytes())  # a storage of its own, no larger than its elements need


def _storages(nodes: Iterable[Any]) -> dict[int, int]:
    """The bytes of each storage below the values of `nodes`."""
    found: dict[int, int] = {}
    for node in nodes:
        for value in tree_leaves(node.meta.get("val")) if isinstance(node, fx.Node) else ():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                storage = value.untyped_storage()
                found[storage._cdata] = _hint(storage.nbytes())
    return found


def _is_random(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "call_function" and node.target is not operator.getitem and not _is_symbolic(node)
    tags = node.target.tags
    return torch.Tag.nondeterministic_seeded in tags or torch.Tag.nondeterministic_bitwise in tags


def _is_symbolic(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(optimization_hint(size, fallback=_UNKNOWN))


def _hinted_leaf(leaf: Any) -> Any:
    if isinstance(leaf, fx.Node):
        return hinted(leaf.meta.get("val"))
    if isinstance(leaf, torch.SymInt):
        return _hint(leaf)
    if isinstance(leaf, torch.SymFloat):
        return 1.0
    if isinstance(leaf, torch.SymBool):
        return True
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        shape, stride = [_hint(one) for one in leaf.shape], [_hint(one) for one in leaf.stride()]
        return torch.empty_strided(shape, stride, dtype=leaf.dtype, device="meta")
    return leaf


# Pre-images of the inputs that a compiled region writes to, so that backward never reads the written value.
#
# A partitioner takes an input of forward as available in backward, for no bytes. That is wrong of an input that forward
# writes to: when backward runs, it holds the new value, and a recompute from it applies the write a second time. Before
# a joint graph is cut, everything that reads such an input reads a clone of it that may not be recomputed. A cut then
# saves this clone, or something computed from it, and counts its bytes. A clone that no cut saves is removed again.

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
