"""Searches for recipes: walks the graph from a tensor's node back to values that are saved, and to leaves.

For each operand the search takes the first of these that exists: the save of the node that reads the operand; another
node's save of the same output (noted at the node that made it); the save that the producing node made of its own
output; a recipe for the output. It skips stale saves, and saves in the storage that is to be recomputed.

Everything that the result depends on is read through the methods under "Reads of the graph". compiled_search.py
overrides them, to write down what was asked and answered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vdnn._C import KeptSave, LightSave, UsableSaves, noted_save
from vdnn.runtime.recompute.backend_flags import (
    Flags,
    backend_flags,
    flags_between_readings_of,
    flags_of,
    flags_of_saving,
    times_convolutions,
)
from vdnn.runtime.recompute.compiled_run import run_for
from vdnn.runtime.recompute.given import Constant, Given, Leaf, Unpack, geometry_of, tensor_read
from vdnn.runtime.recompute.leaf_versions import version_read
from vdnn.runtime.recompute.node_notes import Packed, facts_of
from vdnn.runtime.recompute.operation import Argument, Call, Cost, Node, Operation, Step
from vdnn.runtime.recompute.recipe import Recipe, Signature, Template
from vdnn.runtime.recompute.saved_values import number_in, saved_in, saved_output, scalars_of
from vdnn.runtime.recompute.shapeless import shapeless_signature
from vdnn.runtime.recompute.table import indices_of, operation_of
from vdnn.runtime.storage.facts import Geometry
from vdnn.runtime.storage.packed_view import PackedView
from vdnn.runtime.torch_internals.tensor_kinds import CLASSES_WITH_DATA, has_plain_storage
from vdnn.runtime.training_state.homes import is_managed

LEAF = "torch::autograd::AccumulateGrad"
_OWNER_DISTANCE = 4  # nodes between a later save and the node that made a save without a grad_fn
_OWNER_NODES = 24
_FREE_PER_DEPTH = 6  # views between two operations; keeps the walk short


@dataclass(slots=True, eq=False)
class Computed:
    """A value that a step computes. `height` is the longest chain of operations that ends in it, without views."""

    operation: Operation
    call: Call
    inputs: tuple[Value | None, ...]
    height: int
    flags: Flags | None  # None for a view


@dataclass(slots=True, eq=False)
class Available:
    """A value that the recipe can read."""

    given: Given
    height: int = 0


Value = Computed | Available
Edges = tuple[tuple[Node | None, int], ...]


class Wanted(NamedTuple):
    """The tensor that a recipe has to make, and its node. See [Note: Result of a recipe]."""

    tensor: torch.Tensor
    node: Node


def wanted_for(tensor: torch.Tensor, node: Node | None) -> Wanted | None:
    """Return the tensor that a recipe for `tensor`, whose grad_fn is `node`, has to make; None if there can be none."""
    if not _fills_storage(tensor):
        base = tensor._base
        if base is None or not _fills_storage(base):
            return None
        tensor, node = base, base.grad_fn
    return None if node is None else Wanted(tensor, node)


def search_recipe(wanted: Wanted, search: Search) -> tuple[Recipe, list[Value]] | None:
    """The recipe, and its values in the order of their evaluation. None if the graph does not give a recipe."""
    tensor, node = wanted
    operation = search.operation_of(node)
    if operation is None or (tensor._version and tensor._version > writes_shown(node, operation)):
        return None
    result = search.computed(node, operation, tensor.output_nr, search.max_depth)
    if result is None:
        return None
    order = evaluation_order(result)
    recipe = _recipe(result, order, (tensor.dtype, tensor.size(), tensor.stride()), search)
    return None if recipe is None else (recipe, order)


def owner_recipe(packed: Packed, node: Node | None, our_unpack: Unpack) -> Recipe | None:
    """A recipe for integers that an operation saved along with its output (the indices of max pooling) and that have no
    grad_fn. The search looks for the node near `node` that saved `packed`."""
    if not isinstance(packed, PackedView) or node is None:
        return None
    near: list[Node] = [node]
    seen = 0
    for _ in range(_OWNER_DISTANCE + 1):
        further: list[Node] = []
        for one in near:
            seen += 1
            operation = indices_of(one)
            if operation is not None and saved_in(one, "result1", our_unpack) is packed:
                search = Search(our_unpack, 1, False, packed.managed.native_address)
                result = search.computed(one, operation, 0, 1, of_indices=packed.geometry)
                if result is None:
                    return None
                return _recipe(result, evaluation_order(result), packed.geometry, search)
            further += [producer for producer, _ in one.next_functions if producer is not None]
        if seen > _OWNER_NODES:
            return None
        near = further
    return None


@dataclass(slots=True)
class Search:
    """The search for one recipe. Holds graph nodes while it exists."""

    unpack: Unpack
    max_depth: int
    expensive: bool
    avoided: int  # the native address of the storage that is to be recomputed
    known: dict[tuple[Node, int], Value] = field(default_factory=dict)
    tried: dict[tuple[Node, int], int] = field(default_factory=dict)  # the largest `left` for which no recipe was found
    found: dict[int, Available] = field(default_factory=dict)  # by the identity of the view or tensor
    sensitive_nodes: list[int] = field(default_factory=list)  # sequence numbers: any setting may change these
    rounding_nodes: list[int] = field(default_factory=list)  # those of operations that round once
    steps_left: int = 0

    def __post_init__(self) -> None:
        self.steps_left = _FREE_PER_DEPTH * (self.max_depth + 1)

    def computed(
        self, node: Node, operation: Operation, output_nr: int, left: int, *, of_indices: Geometry | None = None
    ) -> Computed | None:
        """An output of `node`, computed with at most `left` operations in a row; None if that is not possible."""
        own = operation.length
        self.steps_left -= 1
        if left < own or self.steps_left < 0 or (operation.cost is Cost.EXPENSIVE and not self.expensive):
            return None
        if output_nr and not operation.makes_every_output:
            return None
        flags = None
        if operation.cost is not Cost.FREE:
            flags = self.flags_of(node, operation, output_nr)
            if flags is None:
                return None
        scalars = self.scalars_of(node, operation.scalars)
        facts = self.facts_of(node, operation.facts)
        if scalars is None or facts is None:
            return None
        inputs = self._inputs(node, operation, left - own)
        if inputs is None:
            return None
        output = self.output_of(node, output_nr)
        if output.is_nested_tensor:
            return None
        dtype, shape = (output.dtype, torch.Size(output.shape)) if of_indices is None else of_indices[:2]
        if dtype.is_complex and operation.may_be_in_place:
            return None  # the CPU's complex division in place differs in the last bit from the one out of place
        call = Call(scalars + facts, dtype, shape, output.device, output_nr)
        height = own + max((one.height for one in inputs if one is not None), default=0)
        return Computed(operation, call, inputs, height, flags)

    def _inputs(self, node: Node, operation: Operation, left: int) -> tuple[Value | None, ...] | None:
        edges = self.edges_of(node)
        arguments = operation.arguments
        if operation.takes_every_edge:
            arguments = tuple(Argument(edge=index) for index in range(len(edges)))
        inputs: list[Value | None] = []
        for argument in arguments:
            value = self._argument(node, edges, argument, left)
            if value is None and (argument.is_absent is None or not self.is_absent(node, argument.is_absent)):
                return None
            inputs.append(value)
        return tuple(inputs)

    def _argument(self, node: Node, edges: Edges, argument: Argument, left: int) -> Value | None:
        if argument.slot is not None:
            given = self.given_in(node, argument.slot)
            if given is not None:
                return self._available(given)
        if argument.edge is None or argument.edge >= len(edges):
            return None
        producer, output_nr = self.producer(node, edges, argument.edge)
        if producer is None:
            return None
        if producer.name() == LEAF:
            leaf = self.leaf_of(producer, node)
            return None if leaf is None else self._available(leaf)
        return self._output(producer, output_nr, left)

    def _output(self, node: Node, output_nr: int, left: int) -> Value | None:
        key = (node, output_nr)
        known = self.known.get(key)
        if known is not None:
            return known if known.height <= left else None
        if self.tried.get(key, -1) >= left:
            return None
        value: Value | None = None
        packed = self.saved_output(node, output_nr)
        if packed is not None:
            value = self._available(packed)
        else:
            operation = self.operation_of(node)
            if operation is not None:
                value = self.computed(node, operation, output_nr, left)
        if value is None:
            self.tried[key] = left
        else:
            self.known[key] = value
        return value

    def _available(self, given: Given) -> Available:
        if isinstance(given, Constant):
            return Available(given)
        held = given if isinstance(given, (PackedView, LightSave)) else tensor_read(given)[0]
        found = self.found.get(id(held))
        if found is None:
            found = self.found[id(held)] = Available(given)
        return found

    # Reads of the graph.

    def operation_of(self, node: Node) -> Operation | None:
        return operation_of(node)

    def flags_of(self, node: Node, operation: Operation, output_nr: int) -> Flags | None:
        """The settings under which the operation ran, if they are known and determine what it computes."""
        if operation.rounds_once(node):
            self.rounding_nodes.append(node._sequence_nr())
            return flags_between_readings_of(node)
        self.sensitive_nodes.append(node._sequence_nr())
        flags = flags_of_saving(node) if operation.must_be_seen else flags_of(node)
        if flags is not None and operation.on_cudnn and is_on_cuda(node, output_nr) and times_convolutions(flags):
            return None
        return flags

    def scalars_of(self, node: Node, names: tuple[str, ...]) -> tuple[Any, ...] | None:
        return scalars_of(node, names)

    def facts_of(self, node: Node, names: tuple[str, ...]) -> tuple[Any, ...] | None:
        return facts_of(node, names)

    def output_of(self, node: Node, output_nr: int) -> Any:
        """Autograd's own record of this output: dtype, shape, device."""
        return node._input_metadata[output_nr]

    def edges_of(self, node: Node) -> Edges:
        return node.next_functions

    def producer(self, node: Node, edges: Edges, index: int) -> tuple[Node | None, int]:
        return edges[index]

    def is_absent(self, node: Node, test: Callable[[Node], bool]) -> bool:
        return test(node)

    def given_in(self, node: Node, slot: str) -> Packed | Constant | None:
        """The value that the node saved in this slot, if a recipe can read it."""
        packed = saved_in(node, slot, self.unpack)
        if packed is not None:
            return packed if is_usable(packed, self.avoided) else None
        number = number_in(node, slot)
        return None if number is None else Constant(number)

    def leaf_of(self, producer: Node, reader: Node) -> Leaf | None:
        """The leaf behind this edge of `reader`, if it still has the version that `reader` read."""
        leaf: torch.Tensor = producer.variable  # type: ignore[attr-defined]
        return leaf_read(leaf, reader)

    def saved_output(self, node: Node, output_nr: int) -> Packed | None:
        """A save of this output that a recipe can read."""
        packed: Packed | None = noted_save(node, output_nr)
        if packed is None or not is_usable(packed, self.avoided):
            packed = saved_output(node, output_nr, self.unpack)
        return packed if packed is not None and is_usable(packed, self.avoided) else None


def is_usable_save(packed: Packed, avoided: int) -> bool:
    """True if a recipe can read the save: it is not stale, and not in the storage that is to be recomputed.

    `avoided` is the native address of that storage. `is_usable` answers the same for plain tensors and light saves
    without Python."""
    if isinstance(packed, PackedView):
        managed = packed.managed
        return managed.witness._version == managed.version and managed.native_address != avoided
    if isinstance(packed, LightSave):
        return packed.is_current and packed.native_address != avoided
    if not isinstance(packed, (tuple, KeptSave)):  # a parameter that a session manages
        return False
    tensor, version = tensor_read(packed)
    return tensor._version == version and has_plain_storage(tensor) and tensor.untyped_storage()._cdata != avoided


_Base = torch._C.TensorBase
is_usable: Callable[[Packed, int], bool] = UsableSaves(
    CLASSES_WITH_DATA,
    torch.strided,
    _Base._version,
    _Base.layout,
    _Base.is_quantized,
    _Base.is_nested,
    _Base.is_meta,
    _Base._is_zerotensor,
    torch._is_functional_tensor,
    torch._C._functorch.is_functorch_wrapped_tensor,
    _Base.untyped_storage,
    is_usable_save,
).test


def leaf_read(leaf: torch.Tensor, reader: Node) -> Leaf | None:
    """`leaf` as `reader` read it, if a recipe can read it later. A parameter that a session manages is on the host
    then."""
    if is_managed(leaf):
        return None
    version = version_read(leaf, reader)
    if version is None or not has_plain_storage(leaf):
        return None
    return Leaf(leaf, version, leaf.untyped_storage()._cdata)


def is_on_cuda(node: Node, output_nr: int) -> bool:
    device: torch.device = node._input_metadata[output_nr].device
    return device.type == "cuda"


def writes_shown(node: Node, operation: Operation | None) -> int:
    """The largest number of in-place writes to a node's output that the graph can account for.

    A tensor with more writes was also written without a graph, or through detach. Its value is not the result of the
    node.
    """
    count = 0
    while operation is not None and (operation.may_be_in_place or operation.cost is Cost.FREE):
        count += operation.may_be_in_place
        edges = node.next_functions
        producer = edges[0][0] if edges else None
        if producer is None or producer.name() == LEAF:
            break
        node, operation = producer, operation_of(producer)
    return count


def _fills_storage(tensor: torch.Tensor) -> bool:
    """True if the tensor has every element of its storage, and each once."""
    return (
        not tensor.storage_offset()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and (tensor.is_contiguous() or torch._debug_has_internal_overlap(tensor) == 0)
        and not (tensor.dtype.is_complex and tensor.is_conj())
        and not tensor.is_neg()
    )


# Turning values into the steps of a recipe.


def evaluation_order(wanted: Computed) -> list[Value]:
    order: list[Value] = []
    _visit(wanted, order, set())
    return order


def _recipe(wanted: Computed, order: list[Value], geometry: Geometry, search: Search) -> Recipe | None:
    given = [value for value in order if isinstance(value, Available)]
    computed = [value for value in order if isinstance(value, Computed)]
    ran_under = {value.flags for value in computed if value.flags is not None}
    if len(ran_under) > 1:
        return None
    flags = ran_under.pop() if ran_under else backend_flags()
    indices = {id(value): index for index, value in enumerate([*given, *computed])}
    inputs = [tuple(-1 if one is None else indices[id(one)] for one in value.inputs) for value in computed]
    last_reader = {index: step for step, read in enumerate(inputs) for index in read}
    steps = tuple(
        Step(value.operation, value.call, read, tuple({index for index in read if last_reader[index] == step} - {-1}))
        for step, (value, read) in enumerate(zip(computed, inputs, strict=True))
    )
    depths = _depths(order)
    operations = [step.operation for step in steps]
    names = [one.name for one in reversed(operations) if one.cost is not Cost.FREE] or [operations[-1].name]
    template = Template(
        name=" <- ".join(dict.fromkeys(names)),
        signature=signature_of(steps, [value.given for value in given], geometry, flags),
        shapeless=shapeless_signature(steps, [value.given for value in given], geometry, flags),
        operand_depths=tuple(depths[id(value)] for value in given if isinstance(value.given, PackedView)),
        depth=wanted.height,
        is_cheap=all(one.cost is not Cost.EXPENSIVE for one in operations),
        steps=steps,
        geometry=geometry,
        flags=flags,
        run=run_for(steps, len(given)),
    )
    return Recipe(
        template,
        operands=tuple(value.given for value in given if isinstance(value.given, PackedView)),
        given=tuple(value.given for value in given),
        sensitive_nodes=tuple(search.sensitive_nodes),
        rounding_nodes=tuple(search.rounding_nodes),
        light_operands=tuple(value.given for value in given if isinstance(value.given, LightSave)),
    )


def _depths(order: list[Value]) -> dict[int, int]:
    """The number of operations on the longest path from a value to the result, by the value's identity."""
    depths: dict[int, int] = {}
    for value in reversed(order):
        if isinstance(value, Computed):
            depth = depths.get(id(value), 0) + value.operation.length
            for one in value.inputs:
                if one is not None:
                    depths[id(one)] = max(depths.get(id(one), 0), depth)
    return depths


def _visit(value: Value, order: list[Value], seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Computed):
        for one in value.inputs:
            if one is not None:
                _visit(one, order, seen)
    order.append(value)


def signature_of(steps: tuple[Step, ...], given: Sequence[Given], geometry: Geometry, flags: Flags) -> Signature:
    """The facts for which a trial of the recipe, with its cost, holds."""
    chain = tuple((step.operation.name, step.call, step.inputs) for step in steps)
    return Signature(chain, tuple(_geometry_of(one) for one in given), geometry, flags)


def _geometry_of(given: Given) -> Hashable:
    return (type(given.value), given.value) if isinstance(given, Constant) else geometry_of(given)
