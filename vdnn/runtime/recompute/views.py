"""Views, and operations that copy values without computing: cat, stack, repeat, roll.

If a node does not keep the shape of its result (view, expand), the recipe uses the shape of the node's output, which
autograd knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vdnn.runtime.recompute.operation import FIRST, Call, Layout, Operation, Table, pieces, view

Tensor = torch.Tensor
_aten = torch.ops.aten


def _viewed(call: Call, input: Tensor) -> Tensor:
    """A view, or a reshape if the input's strides allow no view: those of the original may have been different."""
    return input.reshape(call.shape)


def _split(call: Call, input: Tensor) -> Tensor:
    size, dim = call.scalars
    pieces: tuple[Tensor, ...] = (
        torch.split_with_sizes(input, size, dim) if isinstance(size, tuple) else _aten.split(input, size, dim)
    )
    return pieces[call.output_nr]


def _joined(name: str, join: Any) -> Operation:
    def joined(call: Call, *parts: Tensor) -> Tensor:
        made: Tensor = join(parts, call.scalars[0])
        return made

    return Operation(name, joined, (), ("dim",), takes_every_edge=True, layout=Layout.IGNORED, is_by_row=True)


def _copied(name: str, run: Callable[..., Tensor], *scalars: str) -> Operation:
    return Operation(name, run, FIRST, scalars, layout=Layout.IGNORED, is_by_row=True)


TABLE: Table = {
    "ViewBackward0": view("view", _viewed),
    "UnsafeViewBackward0": view("view", _viewed),
    "ReshapeAliasBackward0": view("view", _viewed),
    "AliasBackward0": view("alias", lambda call, x: x),
    "TBackward0": view("t", lambda call, x: x.t()),
    "TransposeBackward0": view("transpose", lambda call, x: x.transpose(*call.scalars), "dim0", "dim1"),
    "PermuteBackward0": view("permute", lambda call, x: x.permute(call.scalars[0]), "dims"),
    "ExpandBackward0": view("expand", lambda call, x: x.expand(call.shape)),
    "UnsqueezeBackward0": view("unsqueeze", lambda call, x: x.unsqueeze(call.scalars[0]), "dim"),
    "SqueezeBackward0": view("squeeze", lambda call, x: x.squeeze()),
    "SqueezeBackward1": view("squeeze", lambda call, x: x.squeeze(call.scalars[0]), "dim"),
    "SqueezeBackward2": view("squeeze", lambda call, x: x.squeeze(call.scalars[0]), "dim"),
    "SelectBackward0": view("select", lambda call, x: x.select(*call.scalars), "dim", "index"),
    "SliceBackward0": view(
        "slice", lambda call, x: _aten.slice(x, *call.scalars), "dim", "start", "end", "step", sizes=("start", "end")
    ),
    "SplitBackward0": pieces("split", _split, "split_size", "dim", sizes=("split_size",)),
    "UnsafeSplitBackward0": pieces("split", _split, "split_size", "dim", sizes=("split_size",)),
    "SplitWithSizesBackward0": pieces("split", _split, "split_sizes", "dim", sizes=("split_sizes",)),
    "UnbindBackward0": pieces("unbind", lambda call, x: x.unbind(call.scalars[0])[call.output_nr], "dim"),
    "CatBackward0": _joined("cat", torch.cat),
    "StackBackward0": _joined("stack", torch.stack),
    "RepeatBackward0": _copied("repeat", lambda call, x: x.repeat(call.scalars[0]), "repeats"),
    "RollBackward0": _copied("roll", lambda call, x: x.roll(*call.scalars), "shifts", "dims"),
}
