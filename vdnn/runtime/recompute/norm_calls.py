"""Names the functions of torch from whose calls the arguments of norms are read that autograd's nodes do not save.

Layer norm and RMS norm do not save their eps; batch, group and instance norm do not save whether a bias was given, and
group norm saves its eps in older versions of torch only (2.13 does, 2.15 does not). csrc/hooks/norm_calls.cpp reads
them from the frame of the call at the first save that a recipe may read. A norm that is called in another way (torch's
native function itself, or a function of the program in place of one of torch's) has no facts, and is not recomputed.
"""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Any

from torch.nn import functional
from torch.utils._device import DeviceContext

from vdnn._C import watch_norm_calls

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


def watch() -> None:
    """From now on the calls are noted, in sessions that recompute."""
    watch_norm_calls(
        tuple((one.__code__, *_LACKING[one]) for one in _ORIGINAL),
        (DeviceContext.__torch_function__.__code__,),
        f"{Path(__file__).parents[2]}/",
    )
