"""The audited table: the operations that can be run again, by the name of autograd's node.

Operations that are not in the table end a chain: custom Functions, checkpoints, in-place writes to views, random
operations that keep no mask, and everything that was not audited. Each entry has a test of bitwise equality.
"""

from __future__ import annotations

from vdnn.runtime.recompute import elementwise, expensive, norms, reductions, views
from vdnn.runtime.recompute.operation import Node, Operation

_TABLE = {**elementwise.TABLE, **views.TABLE, **reductions.TABLE, **norms.TABLE, **expensive.TABLE}


def operation_of(node: Node) -> Operation | None:
    """The operation that made the node's outputs, if it is in the table."""
    found = _TABLE.get(node.name())
    if found is None or isinstance(found, Operation):
        return found
    return found(node)


def is_chosen_by_its_node(node: Node) -> bool:
    """True if the operation depends on more than the name of the node."""
    found = _TABLE.get(node.name())
    return found is not None and not isinstance(found, Operation)


def indices_of(node: Node) -> Operation | None:
    """The operation that made the integers that the node saved along with its output."""
    found = reductions.INDICES.get(node.name())
    return found if isinstance(found, Operation) else None


def recipe_names() -> tuple[str, ...]:
    """The names of the table's nodes, in its order."""
    return tuple(_TABLE)
