"""Facts that autograd's nodes lack: which of their outputs are saved, and some arguments of the calls that made them.

saved outputs      note_saved, called at every save: a chain that reaches the output stops there. It is noted in the
                   node's `metadata`, which lives as long as the node and must own nothing that is saved.
eps                layer norm and RMS norm do not save it; norm_calls reads it from their call.
no bias            a norm's node does not tell a bias without a gradient from no bias; its call does.
"""

from __future__ import annotations

from typing import Any

from vdnn._C import KeptSave, LightSave, fact_of_norm
from vdnn.runtime.recompute.norm_calls import watch
from vdnn.runtime.recompute.operation import Node
from vdnn.runtime.storage.kept import KeptTensor
from vdnn.runtime.storage.packed_view import PackedView

NativeSave = KeptSave | LightSave
Packed = KeptTensor | NativeSave | PackedView

EPS = "eps"
NO_BIAS = "no bias"
UNKNOWN = object()
watch()


def facts_of(node: Node, names: tuple[str, ...]) -> tuple[Any, ...] | None:
    """The facts of the call that made the node, in the order of `names`; None if one of them is not known. Call it on
    the operation's thread."""
    facts = tuple(fact_of_norm(node, name, UNKNOWN) for name in names)
    return None if any(one is UNKNOWN for one in facts) else facts


def has_no_bias(node: Node) -> bool:
    return facts_of(node, (NO_BIAS,)) == (True,)
