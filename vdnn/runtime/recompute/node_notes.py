"""Facts that autograd's nodes lack: which of their outputs are saved, and some arguments of the calls that made them.

saved outputs      note_saved, called at every save: a chain that reaches the output stops there. It is noted in the
                   node's `metadata`, which lives as long as the node and must own nothing that is saved.
eps                layer norm and RMS norm do not save it, and group norm only in older versions of torch (2.13 does,
                   2.15 does not).
no bias            the node of a batch, group or instance norm does not tell a bias without a gradient from no bias.

csrc/hooks/norm_calls.cpp reads eps and the bias from the frame of the call of torch.nn.functional's function, at the
first save that a recipe may read. A norm that is called in another way (torch's native function itself, or a function
of the program in place of one of torch's) has no facts, and is not recomputed.
"""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Any

from torch.nn import functional
from torch.utils._device import DeviceContext

from vdnn._C import KeptSave, LightSave, fact_of_norm, watch_norm_calls
from vdnn.runtime.recompute.operation import Node
from vdnn.runtime.storage.kept import KeptTensor
from vdnn.runtime.storage.packed_view import PackedView

NativeSave = KeptSave | LightSave
Packed = KeptTensor | NativeSave | PackedView

EPS = "eps"
NO_BIAS = "no bias"
UNKNOWN = object()

_BATCH_NORMS = frozenset({"NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0"})
# The nodes that each function makes, and if they lack the eps and the bias.
_LACKING: dict[Any, tuple[frozenset[str], bool, bool]] = {
    functional.layer_norm: (frozenset({"NativeLayerNormBackward0"}), True, False),
    functional.rms_norm: (frozenset({"FusedRmsNormBackward0"}), True, False),
    functional.batch_norm: (_BATCH_NORMS, False, True),
    functional.instance_norm: (_BATCH_NORMS, False, True),
    functional.group_norm: (frozenset({"NativeGroupNormBackward0"}), True, True),
}
# A program may have replaced one of them before vdnn was imported.
_ORIGINAL = [
    one for one in _LACKING if isinstance(one, FunctionType) and one.__code__.co_filename == functional.__file__
]
# From now on the calls are noted, in sessions that recompute.
watch_norm_calls(
    tuple((one.__code__, *_LACKING[one]) for one in _ORIGINAL),
    (DeviceContext.__torch_function__.__code__,),
    f"{Path(__file__).parents[2]}/",
)


def facts_of(node: Node, names: tuple[str, ...]) -> tuple[Any, ...] | None:
    """The facts of the call that made the node, in the order of `names`; None if one of them is not known. Call it on
    the operation's thread."""
    facts = tuple(fact_of_norm(node, name, UNKNOWN) for name in names)
    return None if any(one is UNKNOWN for one in facts) else facts


def has_no_bias(node: Node) -> bool:
    return facts_of(node, (NO_BIAS,)) == (True,)
