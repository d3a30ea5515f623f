"""Which version a leaf had when an operation read it.

A bias is not saved by the operation that adds it: it is found later through the graph, and its counter says only
which version it is at now. So versions are noted where operations are about to read leaves, at the entry of a module,
together with autograd's sequence number. A leaf that was at its present version when a node was yet to be made was at
this version when that node's operation read it: versions only grow. Of any other leaf nothing is known, and nothing is
recomputed from it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from vdnn.runtime.recompute.operation import Node

_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr


class _Seen(NamedTuple):
    reference: weakref.ref[torch.Tensor]
    version: int
    sequence_nr: int


# By thread and id: sequence numbers are a thread's own. A leaf that is dead takes its entries along.
_seen: dict[tuple[int, int], _Seen] = {}


def observe(leaf: torch.Tensor) -> None:
    """Called before an operation of this thread may read it. Any number of times."""
    key = (threading.get_ident(), id(leaf))
    known = _seen.get(key)
    version = leaf._version
    if known is None or known.version != version or known.reference() is not leaf:
        _seen[key] = _Seen(weakref.ref(leaf, lambda dead: _forget(key, dead)), version, _sequence_nr())


def observe_parameters(module: torch.nn.Module) -> None:
    """Those that are the module's own: for a hook before its forward."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.is_leaf:
            observe(parameter)


def version_read(leaf: torch.Tensor, node: Node) -> int | None:
    """The version that `node`'s operation read, if that is the present one; None if that is not known. Called on the
    thread of the operation."""
    known = _seen.get((threading.get_ident(), id(leaf)))
    if known is None or known.reference() is not leaf or known.version != leaf._version:
        return None
    return known.version if known.sequence_nr <= node._sequence_nr() else None


def _forget(key: tuple[int, int], dead: weakref.ref[torch.Tensor]) -> None:
    known = _seen.get(key)
    if known is not None and known.reference is dead:
        _seen.pop(key, None)
