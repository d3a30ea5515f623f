"""Finds recipes by compiled searches: straight-line code that makes the same checks as an earlier search, and no
others.

A search for a recipe is a function of its reads of the graph: types of nodes, edges, saved scalars, saves and their
versions, settings. The first search that finds a recipe of some structure writes its reads down (Trace), and a function
of Python is made of them: a compiled search. In later steps, and at other places with the same structure, it reads
the same things from the nodes at hand. It returns the recipe that the search would find, or None at the first answer
that differs. Then the search itself decides, and its reads become one more compiled search.

[Note: What is compiled] A compiled search fixes the structure: types of nodes, which argument comes from which save,
edge or leaf, which of them are the same. Values are read anew from the nodes at hand: scalars, facts of calls, sizes,
dtypes, settings. Together they are the key of a Template, which has the steps and the signature for these values. So
one compiled search serves every layer and every length with the same structure, and no fact is taken from an earlier
step.

A search that read something that code cannot ask again (a custom class of nodes, a branch that failed) is not compiled.
tests/runtime/recompute/shadow.py compares each answer with that of the search.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from vdnn._C import KeptSave, LightSave, fact_of_norm, noted_save, save_in_slot
from vdnn.runtime.recompute.backend_flags import (
    Flags,
    backend_flags,
    flags_between_readings_of,
    flags_of,
    flags_of_saving,
    times_convolutions,
)
from vdnn.runtime.recompute.compiled_run import fetch_for
from vdnn.runtime.recompute.finder import (
    LEAF,
    Available,
    Computed,
    Edges,
    Search,
    Value,
    Wanted,
    is_on_cuda,
    is_usable,
    leaf_read,
    search_recipe,
    signature_of,
    wanted_for,
    writes_shown,
)
from vdnn.runtime.recompute.given import Constant, Given, Leaf, Unpack, tensor_read
from vdnn.runtime.recompute.node_notes import UNKNOWN, Packed
from vdnn.runtime.recompute.operation import ALPHA, Call, Node, Operation
from vdnn.runtime.recompute.recipe import Recipe, Template
from vdnn.runtime.recompute.saved_values import may_save_output, number_in, saved_output, signed
from vdnn.runtime.recompute.shapeless import shapeless_signature
from vdnn.runtime.recompute.table import is_chosen_by_its_node, operation_of
from vdnn.runtime.storage.facts import Geometry
from vdnn.runtime.storage.packed_view import PackedView

_KEPT = 24  # for one kind of node; the one that was used longest ago makes room
_COMPILED = 256  # that a process compiles for one kind of node; later searches are not compiled
_TEMPLATES = 256  # of one compiled search

CompiledSearch = Callable[[torch.Tensor, Node, Unpack, int], "Recipe | None"]


def find_recipe(
    tensor: torch.Tensor, node: Node | None, our_unpack: Unpack, *, max_depth: int, expensive: bool = False
) -> Recipe | None:
    """A recipe for `tensor`, whose grad_fn is `node`, with at most `max_depth` operations in a row. None if the graph
    does not give one. `our_unpack` is the unpack hook by which saves of ours are recognized. With `expensive`, recipes
    may contain convolutions, matrix products, embeddings and attention.

    For a tensor that does not fill its storage the recipe makes the tensor that it is a view of. See
    [Note: Result of a recipe].
    """
    wanted = wanted_for(tensor, node)
    if wanted is None:
        return None
    avoided = wanted.tensor.untyped_storage()._cdata
    key = type(wanted.node), _first_producer(wanted.node), wanted.tensor.output_nr, max_depth, expensive
    searches = _compiled.get(key)
    if searches is None:
        if operation_of(wanted.node) is None:
            return None
        searches = _compiled[key] = _CompiledSearches((max_depth, expensive))
    recipe = searches.run(wanted, our_unpack, avoided)
    if recipe is not None:
        return recipe
    # Without a trace, which costs several times as much: a save without a recipe is searched in vain in every step.
    found = search_recipe(wanted, Search(our_unpack, max_depth, expensive, avoided))
    if found is None:
        return None
    if searches.made < _COMPILED:
        trace = Trace(our_unpack, max_depth, expensive, avoided, wanted)
        traced = search_recipe(wanted, trace)
        compiled = None if traced is None else trace.compiled(*traced)
        if compiled is not None:
            searches.add(compiled)
    return found[0]


def _first_producer(node: Node) -> type | None:
    """The type of the node that made the first operand. Classes of Python are one type: there may be any number."""
    edges = node.next_functions
    if len(edges) == 0:
        return None
    found: type = type(edges[0][0])
    return BackwardCFunction if issubclass(found, BackwardCFunction) else found


class _CompiledSearches:
    """Those for one kind of node, the last used first. `limits`: depth, and if expensive operations count."""

    def __init__(self, limits: tuple[int, bool]) -> None:
        self.limits = limits
        self._compiled: list[CompiledSearch] = []
        self.made = 0

    def run(self, wanted: Wanted, unpack: Unpack, avoided: int) -> Recipe | None:
        tensor, node = wanted
        for index, compiled in enumerate(self._compiled):
            try:
                recipe = compiled(tensor, node, unpack, avoided)
            except (AttributeError, RuntimeError):  # a node whose saves are freed
                continue
            if recipe is not None:
                if index:
                    self._compiled = [compiled, *(one for one in self._compiled if one is not compiled)]
                return recipe
        return None

    def add(self, compiled: CompiledSearch) -> None:
        self._compiled = [compiled, *self._compiled[: _KEPT - 1]]
        self.made += 1


# By the types of a node in the table and of its first producer, the output, and the limits.
_compiled: dict[Hashable, _CompiledSearches] = {}


@dataclass(slots=True)
class _Templates:
    """The templates of one compiled search, by the values that it read. `first` has the structure."""

    first: Template
    by_key: dict[Hashable, Template] = field(default_factory=dict)

    def make(self, key: Hashable, geometry: Geometry, flags: Flags, calls: tuple[Any, ...], given: Any) -> Template:
        """A template for values that are new. `calls` has scalars, facts, output and its number for each step."""
        first = self.first
        steps = tuple(
            step._replace(call=Call((*map(signed, scalars), *facts), m.dtype, torch.Size(m.shape), m.device, output_nr))
            for step, (scalars, facts, m, output_nr) in zip(first.steps, calls, strict=True)
        )
        signature = signature_of(steps, given, geometry, flags)
        shapeless = shapeless_signature(steps, given, geometry, flags)
        made = replace(first, signature=signature, shapeless=shapeless, steps=steps, geometry=geometry, flags=flags)
        if len(self.by_key) >= _TEMPLATES:
            self.by_key.clear()
        self.by_key[key] = made
        return made


class _CallNames(NamedTuple):
    """The names in the code for the parts of the call that computed a value."""

    scalars: list[str]
    facts: list[str]
    output: str
    output_nr: int


class Trace(Search):
    """A search that writes each read and its answer down as a line of code.

    In the code `t` is the tensor, `n0` its node, `U` our unpack hook, and `A` the storage that no operand may be in.
    """

    def __init__(self, unpack: Unpack, max_depth: int, expensive: bool, avoided: int, wanted: Wanted) -> None:
        super().__init__(unpack, max_depth, expensive, avoided)
        self.lines: list[str] = []
        self.constants: dict[str, Any] = dict(_READS)
        self._can_be_compiled = True
        self._key = ["t.dtype", "t.size()", "t.stride()"]  # expressions
        # By identity; each entry holds its object, so that no other one gets the identity.
        self._nodes: dict[int, tuple[Node, str]] = {}
        self._holders: dict[int, tuple[object, str]] = {}  # tensors and views that the recipe reads
        self._given: dict[int, tuple[Given, str, str]] = {}  # an expression for the value, and one for the key
        self._calls: dict[int, tuple[Computed, _CallNames]] = {}
        self._first: Operation | None = None  # the operation of `n0`
        self._flags = ""  # the name of the settings under which the operations ran
        self._sensitive: list[str] = []  # names of the nodes that any setting may change
        self._rounding: list[str] = []  # names of those whose operations round once
        self._last: dict[str, Any] = {}  # names of the reads for the node whose call is made
        self._wanted = wanted.tensor
        self._name_node(wanted.node, "n0")

    # Writing.

    def _line(self, text: str) -> None:
        self.lines.append(text)

    def _refuse_if(self, condition: str) -> None:
        self.lines.append(f"if {condition}: return None")

    def _read(self, letter: str, expression: str) -> str:
        name = f"{letter}{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def _name_node(self, node: Node, name: str) -> None:
        self._nodes[id(node)] = node, name
        # Classes of Python may share the name of a class of torch, and some nodes of torch share one class.
        self._can_be_compiled &= type(node).__name__ == node.name() and not isinstance(node, BackwardCFunction)

    def _name(self, node: Node) -> str:
        return self._nodes[id(node)][1]

    def _add_to_key(self, name: str, value: object) -> None:
        """Adds a value that was read. Numbers of different types are equal, and so are zeros of different signs."""
        if isinstance(value, bool):
            self._key.append(name)
        elif isinstance(value, (int, float, complex)):
            self._key += [f"({name} or REPR({name}))", f"{name}.__class__"]
        elif isinstance(value, (tuple, list)) and any(not isinstance(one, int) for one in value):
            self._key.append(f"REPR({name})")
        else:
            self._key.append(name)

    def _hold(self, holder: object, name: str) -> bool:
        """Notes the saves and leaves that the recipe reads. False if it has a name already: the code then asks if it is
        the same."""
        known = self._holders.get(id(holder))
        if known is not None:
            self._refuse_if(f"{name} is not {known[1]}")
            return False
        for _, other in self._holders.values():
            self._refuse_if(f"{name} is {other}")
        self._holders[id(holder)] = holder, name
        return True

    def _use_packed(self, packed: Packed, name: str) -> None:
        """Writes what makes a save usable. `name` is the packed save."""
        if isinstance(packed, PackedView):
            self._refuse_if(f"not isinstance({name}, VIEW)")
            managed = self._read("m", f"{name}.managed")
            self._refuse_if(f"{managed}.witness._version != {managed}.version or {managed}.native_address == A")
            if self._hold(packed, name):
                self._given[id(packed)] = packed, name, f"{name}.geometry"
            return
        if isinstance(packed, LightSave):
            self._refuse_if(f"type({name}) is not LIGHT or not IS_USABLE({name}, A)")
            if self._hold(packed, name):
                self._given[id(packed)] = packed, name, f"{name}.geometry"
            return
        is_tuple = isinstance(packed, tuple)
        self._refuse_if(f"type({name}) is not {'tuple' if is_tuple else 'KEPT'} or not IS_USABLE({name}, A)")
        holder = self._read("h", f"{name}[0]" if is_tuple else f"{name}.tensor")
        if self._hold(tensor_read(packed)[0], holder):
            self._given[id(packed)] = packed, name, f"({holder}.dtype, {holder}.shape, {holder}.stride())"

    # Reads of the graph.

    def computed(
        self, node: Node, operation: Operation, output_nr: int, left: int, *, of_indices: Geometry | None = None
    ) -> Computed | None:
        made = super().computed(node, operation, output_nr, left, of_indices=of_indices)
        if made is None:
            self._can_be_compiled = False
            return None
        name = self._name(node)
        if operation.may_be_in_place:
            self._refuse_if(f"{self._last[f'{name} {output_nr}']}.dtype.is_complex")
        read = [(f"{name}._saved_{one}", one) for one in operation.scalars]
        self._calls[id(made)] = (
            made,
            _CallNames(
                [self._last[expression] for expression, _ in read],
                [self._last[f"{name} {one}"] for one in operation.facts],
                self._last[f"{name} {output_nr}"],
                output_nr,
            ),
        )
        return made

    def operation_of(self, node: Node) -> Operation | None:
        operation = super().operation_of(node)
        if self._first is None:
            self._first = operation
        if is_chosen_by_its_node(node):
            if super().operation_of(node) is not operation:
                self._can_be_compiled = False
            self._refuse_if(f"OPERATION_OF({self._name(node)}) is not {self._constant(operation)}")
        return operation

    def flags_of(self, node: Node, operation: Operation, output_nr: int) -> Flags | None:
        flags = super().flags_of(node, operation, output_nr)
        name = self._name(node)
        rounds_once = operation.rounds_once(node)
        if operation.scalars == ALPHA:
            self._refuse_if(f"{name}._saved_alpha {'!=' if rounds_once else '=='} 1")
        if rounds_once:
            self._rounding.append(name)
            read = self._read("f", f"FLAGS_BETWEEN_READINGS_OF({name})")
        else:
            self._sensitive.append(name)
            read = self._read("f", f"{'FLAGS_OF_SAVING' if operation.must_be_seen else 'FLAGS_OF'}({name})")
        if self._flags:
            self._refuse_if(f"{read} is not {self._flags} and {read} != {self._flags}")
        else:
            self._flags = read
            self._refuse_if(f"{read} is None")
        if operation.on_cudnn:
            self._refuse_if(f"IS_ON_CUDA({name}, {output_nr}) and TIMES_CONVOLUTIONS({read})")
        return flags

    def scalars_of(self, node: Node, names: tuple[str, ...]) -> tuple[Any, ...] | None:
        scalars = super().scalars_of(node, names)
        if scalars is not None:
            for one, value in zip(names, scalars, strict=True):
                expression = f"{self._name(node)}._saved_{one}"
                self._last[expression] = self._read("s", expression)
                self._add_to_key(self._last[expression], value)
        return scalars

    def facts_of(self, node: Node, names: tuple[str, ...]) -> tuple[Any, ...] | None:
        facts = super().facts_of(node, names)
        if facts is not None:
            for one, value in zip(names, facts, strict=True):
                name = self._name(node)
                read = self._last[f"{name} {one}"] = self._read("s", f"FACT_OF({name}, {one!r}, UNKNOWN)")
                self._refuse_if(f"{read} is UNKNOWN")
                self._add_to_key(read, value)
        return facts

    def output_of(self, node: Node, output_nr: int) -> Any:
        output = super().output_of(node, output_nr)
        name = self._name(node)
        if name == "n0" and output_nr == self._wanted.output_nr and _is_like(self._wanted, output):
            self._last[f"{name} {output_nr}"] = "t"  # to read a node's metadata takes 2 us
            self._refuse_if("t.is_nested")
            self._key.append("t.device")
            return output
        read = self._last[f"{name} {output_nr}"] = self._read("o", f"{name}._input_metadata[{output_nr}]")
        self._refuse_if(f"{read}.is_nested_tensor")
        self._key += [f"{read}.dtype", f"(*{read}.shape,)", f"{read}.device"]
        return output

    def edges_of(self, node: Node) -> Edges:
        edges = super().edges_of(node)
        name = self._name(node)
        self._last[name] = self._read("e", f"{name}.next_functions")
        self._refuse_if(f"len({self._last[name]}) != {len(edges)}")
        return edges

    def producer(self, node: Node, edges: Edges, index: int) -> tuple[Node | None, int]:
        producer, output_nr = super().producer(node, edges, index)
        edge = f"{self._last[self._name(node)]}[{index}]"
        if producer is None:
            self._refuse_if(f"{edge}[0] is not None")
            return producer, output_nr
        known = self._nodes.get(id(producer))
        name = self._read("n", f"{edge}[0]")
        if known is not None:
            self._refuse_if(f"{name} is not {known[1]}")
        else:
            self._refuse_if(f"type({name}) is not {self._constant(type(producer))}")
        if producer.name() != LEAF:
            self._refuse_if(f"{edge}[1] != {output_nr}")
            if known is None:
                for _, other in self._nodes.values():
                    self._refuse_if(f"{name} is {other}")
                self._name_node(producer, name)
        else:
            self._last["leaf"] = name
        return producer, output_nr

    def is_absent(self, node: Node, test: Callable[[Node], bool]) -> bool:
        if not super().is_absent(node, test):
            return False
        self._refuse_if(f"not {self._constant(test)}({self._name(node)})")
        return True

    def given_in(self, node: Node, slot: str) -> Packed | Constant | None:
        given = super().given_in(node, slot)
        name, attribute = self._name(node), f"_raw_saved_{slot}"
        raw = getattr(node, attribute, None)
        if raw is None:
            if hasattr(type(node), attribute):
                self._refuse_if(f"{name}.{attribute} is not None")
            return given  # else no node of this class has the slot
        if isinstance(given, Constant):
            self._refuse_if(f"SAVE_IN_SLOT({name}, {attribute!r}, U) is not None")
            number = self._read("k", f"NUMBER_IN({name}, {slot!r})")
            self._refuse_if(f"type({number}) is not {self._constant(type(given.value))}")
            self._add_to_key(number, given.value)
            self._can_be_compiled &= not isinstance(given.value, torch.Tensor)
            self._given[id(given)] = given, f"CONSTANT({number})", ""
        elif given is not None:
            packed = self._read("p", f"SAVE_IN_SLOT({name}, {attribute!r}, U)")
            self._use_packed(given, packed)
        elif raw.data is None:
            self._refuse_if(f"{name}.{attribute}.data is not None")
        else:
            packed = self._read("p", f"SAVE_IN_SLOT({name}, {attribute!r}, U)")
            self._refuse_if(f"{packed} is not None and IS_USABLE({packed}, A)")
            self._refuse_if(f"{packed} is None and NUMBER_IN({name}, {slot!r}) is not None")
        return given

    def leaf_of(self, producer: Node, reader: Node) -> Leaf | None:
        leaf = super().leaf_of(producer, reader)
        if leaf is None:
            return None
        read = self._read("l", f"LEAF_READ({self._last['leaf']}.variable, {self._name(reader)})")
        self._refuse_if(f"{read} is None")
        holder = self._read("h", f"{read}[0]")
        if self._hold(leaf.tensor, holder):
            self._given[id(leaf)] = leaf, read, f"({holder}.dtype, {holder}.shape, {holder}.stride())"
        return leaf

    def saved_output(self, node: Node, output_nr: int) -> Packed | None:
        name = self._name(node)
        noted = noted_save(node, output_nr)
        packed = super().saved_output(node, output_nr)
        read = self._read("p", f"NOTED_SAVE({name}, {output_nr})")
        if noted is not None and is_usable(noted, self.avoided):
            # A noted save in a tuple is made anew by each read.
            if packed is not None:
                self._use_packed(packed, read)
            return packed
        self._refuse_if(f"{read} is not None and IS_USABLE({read}, A)")
        if packed is not None or may_save_output(node, output_nr):
            read = self._read("p", f"SAVED_OUTPUT({name}, {output_nr}, U)")
            if packed is None:
                self._refuse_if(f"{read} is not None and IS_USABLE({read}, A)")
            else:
                self._use_packed(packed, read)
        return packed

    # The code.

    def compiled(self, recipe: Recipe, values: list[Value]) -> CompiledSearch | None:
        """The code as a function; None if the search read something that code cannot ask again."""
        if not self._can_be_compiled:
            return None
        given = [self._given[id(one.given)] for one in values if isinstance(one, Available)]
        calls = [self._calls[id(one)][1] for one in values if isinstance(one, Computed)]
        flags = self._flags or self._read("f", "BACKEND_FLAGS()")
        key = self._read("k", _tuple([*self._key, *(in_key for _, _, in_key in given if in_key)]))
        made = _tuple([name for _, name, _ in given])
        views = _tuple([name for one, name, _ in given if isinstance(one, PackedView)])
        light = _tuple([name for one, name, _ in given if isinstance(one, LightSave)])
        made_of = _tuple([_tuple([_tuple(c.scalars), _tuple(c.facts), c.output, str(c.output_nr)]) for c in calls])
        self._line(f"T = TEMPLATES({key})")
        self._line(f"if T is None or (T.flags is not {flags} and T.flags != {flags}):")
        self._line(f"    T = MAKE({key}, (t.dtype, t.size(), t.stride()), {flags}, {made_of}, {made})")
        nodes = _tuple([f"{name}._sequence_nr()" for name in self._sensitive])
        rounding = _tuple([f"{name}._sequence_nr()" for name in self._rounding])
        fetch = self._constant(fetch_for(recipe.given))
        self._line(f"return RECIPE(T, {views}, {made}, {nodes}, {rounding}, {light}, {fetch})")
        templates = _Templates(recipe.template)
        self.constants |= {"TEMPLATES": templates.by_key.get, "MAKE": templates.make}
        writes = f"t._version and t._version > WRITES_SHOWN(n0, {self._constant(self._first)})"
        self.lines.insert(0, f"if {writes}: return None")
        source = "def search(t, n0, U, A):\n" + "".join(f"    {line}\n" for line in self.lines)
        exec(compile(source, "<search of vdnn for a recipe>", "exec"), self.constants)
        compiled: CompiledSearch = self.constants["search"]
        return compiled


def _is_like(tensor: torch.Tensor, metadata: Any) -> bool:
    return (
        tensor.dtype is metadata.dtype
        and tuple(tensor.shape) == tuple(metadata.shape)
        and tensor.device == metadata.device
    )


def _tuple(names: list[str]) -> str:
    return f"({', '.join(names)},)" if names else "()"


# What the code reads with.
_READS: dict[str, Any] = {
    "VIEW": PackedView,
    "KEPT": KeptSave,
    "LIGHT": LightSave,
    "RECIPE": Recipe,
    "CONSTANT": Constant,
    "FACT_OF": fact_of_norm,
    "UNKNOWN": UNKNOWN,
    "REPR": repr,
    "OPERATION_OF": operation_of,
    "FLAGS_OF": flags_of,
    "FLAGS_OF_SAVING": flags_of_saving,
    "FLAGS_BETWEEN_READINGS_OF": flags_between_readings_of,
    "IS_ON_CUDA": is_on_cuda,
    "TIMES_CONVOLUTIONS": times_convolutions,
    "IS_USABLE": is_usable,
    "SAVE_IN_SLOT": save_in_slot,
    "NUMBER_IN": number_in,
    "NOTED_SAVE": noted_save,
    "SAVED_OUTPUT": saved_output,
    "LEAF_READ": leaf_read,
    "BACKEND_FLAGS": backend_flags,
    "WRITES_SHOWN": writes_shown,
}
