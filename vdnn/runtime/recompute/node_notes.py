"""What is noted on autograd's nodes: which of their outputs are saved, and what modules know of their calls.

A node's `metadata` lives as long as the node itself, whatever becomes of its Python wrapper. It must own nothing that
is saved: a save is noted by a weak reference, a fact is a plain number.

  saved outputs      note_saved, called at every save: a chain that reaches the output stops there.
  eps                layer norm does not save it; its module knows it.
  no bias            a norm's node cannot tell a bias without a gradient from none at all; its module can.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from vdnn.runtime.kept import KeptTensor
from vdnn.runtime.packed_view import PackedView
from vdnn.runtime.recompute.operation import Node

Packed = KeptTensor | PackedView

EPS = "eps"
NO_BIAS = "no bias"
_MARK = "vdnn"
_BELOW = 3  # nodes that a module may put behind its norm: views, casts
_NORM_NODES = frozenset(
    (
        "NativeLayerNormBackward0",
        "NativeBatchNormBackward0",
        "CudnnBatchNormBackward0",
        "MiopenBatchNormBackward0",
        "NativeGroupNormBackward0",
        "FusedRmsNormBackward0",
    )
)


def note_saved(node: Node, output_nr: int, packed: Packed) -> None:
    """`packed` holds what `node` put out there. The note ends with it."""
    if isinstance(packed, tuple):
        _notes(node)[(_MARK, output_nr)] = (weakref.ref(packed[0]), packed[1])
    else:
        _notes(node)[(_MARK, output_nr)] = (weakref.ref(packed), None)


def noted_save(node: Node, output_nr: int) -> Packed | None:
    """What holds that output, if it is saved and alive."""
    note = _notes(node).get((_MARK, output_nr))
    if note is None:
        return None
    reference, version = note
    holder = reference()
    if holder is None or version is None:
        found: PackedView | None = holder
        return found
    return holder, version


def note_module(module: torch.nn.Module, output: object) -> None:
    """Called after a module's forward: notes what a norm knows of the node of its output."""
    if not isinstance(module, _NORMS) or not isinstance(output, torch.Tensor):
        return
    node = output.grad_fn
    for _ in range(_BELOW):
        if node is None:
            return
        if node.name() in _NORM_NODES:
            _note(module, node)
            return
        edges = node.next_functions
        node = edges[0][0] if edges else None


def facts_of(node: Node, names: tuple[str, ...]) -> tuple[Any, ...] | None:
    """In that order; None if one of them was not noted."""
    if not names:
        return ()
    notes = _notes(node)
    if any((_MARK, name) not in notes for name in names):
        return None
    return tuple(notes[(_MARK, name)] for name in names)


def has_no_bias(node: Node) -> bool:
    return facts_of(node, (NO_BIAS,)) == (True,)


_NORMS = (_NormBase, torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)


def _note(module: Any, node: Node) -> None:
    """Once: a module that hands on what another made knows nothing of its node."""
    notes = _notes(node)
    if (_MARK, EPS) in notes:
        return
    notes[(_MARK, EPS)] = module.eps
    notes[(_MARK, NO_BIAS)] = getattr(module, "bias", None) is None


def _notes(node: Node) -> dict[Any, Any]:
    notes: Any = node.metadata  # a property, whatever the stubs say
    found: dict[Any, Any] = notes
    return found
