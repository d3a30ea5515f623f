"""Notes on autograd's nodes: which of their outputs are saved, and facts of the calls that made them.

A node's `metadata` lives as long as the node itself, whatever happens to its Python wrapper. It must not own anything
that is saved: a save is noted by a weak reference, a fact is a plain number.

  saved outputs      note_saved, called at every save: a chain that reaches the output stops there.
  eps                layer norm and RMS norm do not save it; norm_calls reads it from their call.
  no bias            a norm's node does not tell a bias without a gradient from no bias; its call does.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from vdnn._C import KeptSave, LightSave
from vdnn.runtime.recompute.operation import Node
from vdnn.runtime.storage.kept import KeptTensor
from vdnn.runtime.storage.packed_view import PackedView

NativeSave = KeptSave | LightSave
Packed = KeptTensor | NativeSave | PackedView

EPS = "eps"
NO_BIAS = "no bias"
_MARK = "vdnn"


def key_of_note(name: str) -> Hashable:
    """The key of a fact in a node's `metadata`."""
    return (_MARK, name)


def facts_of(node: Node, names: tuple[str, ...]) -> tuple[Any, ...] | None:
    """The facts, in the order of `names`; None if one of them was not noted."""
    if not names:
        return ()
    notes = _notes(node)
    if any((_MARK, name) not in notes for name in names):
        return None
    return tuple(notes[(_MARK, name)] for name in names)


def has_no_bias(node: Node) -> bool:
    return facts_of(node, (NO_BIAS,)) == (True,)


def _notes(node: Node) -> dict[Any, Any]:
    notes: Any = node.metadata  # a property, contrary to the stubs
    found: dict[Any, Any] = notes
    return found
