"""Remembers which version a leaf had when an operation read it.

An operation does not save a bias that it adds. The search finds the bias later through the graph, and its counter gives
only the present version. So versions are noted at the entry of a module, before operations read its leaves, with
autograd's sequence number. Versions only grow: a leaf that had its present version before a node was created had the
same version when that node's operation read it. Any other leaf's version is not known, and recipes do not read it.
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


# By thread and id, because each thread has its own sequence numbers. An entry is removed when its leaf is freed.
_seen: dict[tuple[int, int], _Seen] = {}


def observe(leaf: torch.Tensor) -> None:
    """Note the present version of `leaf`. Call it before an operation of this thread may read the leaf, any number of
    times."""
    key = (threading.get_ident(), id(leaf))
    known = _seen.get(key)
    version = leaf._version
    if known is None or known.version != version or known.reference() is not leaf:
        _seen[key] = _Seen(weakref.ref(leaf, lambda dead: _forget(key, dead)), version, _sequence_nr())


def observe_parameters(module: torch.nn.Module) -> None:
    """Observe the module's own parameters, in a hook before its forward."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.is_leaf and not parameter.is_inference():
            observe(parameter)


def version_read(leaf: torch.Tensor, node: Node) -> int | None:
    """The version that `node`'s operation read, if it is known to be the present one; else None. Call it on the
    operation's thread."""
    known = _seen.get((threading.get_ident(), id(leaf)))
    if known is None or known.reference() is not leaf or known.version != leaf._version:
        return None
    return known.version if known.sequence_nr <= node._sequence_nr() else None


def _forget(key: tuple[int, int], dead: weakref.ref[torch.Tensor]) -> None:
    known = _seen.get(key)
    if known is not None and known.reference is dead:
        _seen.pop(key, None)
