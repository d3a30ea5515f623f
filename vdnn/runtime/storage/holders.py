"""Names the holders of storages that were copied to the host but not freed, by a search through Python's objects.

The search is slow, because it visits every object that the garbage collector tracks. It runs only for a report. A
storage that no Python object explains is held by native code: another graph, or a C++ extension.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vdnn.runtime.torch_internals.tensor_kinds import storage_of

_NATIVE = "native code (a graph, or an extension)"
_MAX_NAMES = 4


@dataclass(frozen=True, slots=True)
class HeldStorage:
    """A storage that the runtime released and a holder kept alive."""

    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    label: str


def describe_holders(held: Iterable[HeldStorage]) -> list[tuple[HeldStorage, list[str]]]:
    """The storages that are still alive, the largest first, each with descriptions of its holders."""
    alive = {storage._cdata: one for one in held if (storage := one.storage()) is not None}
    tensors: dict[int, list[torch.Tensor]] = {address: [] for address in alive}
    if alive:
        for tensor in [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]:
            storage = storage_of(tensor)
            if storage is not None and storage._cdata in tensors:
                tensors[storage._cdata].append(tensor)
    described = [(one, _names(tensors.pop(address))) for address, one in alive.items()]
    return sorted(described, key=lambda pair: -pair[0].nbytes)


def _names(tensors: list[torch.Tensor]) -> list[str]:
    names: list[str] = []
    for tensor in tensors:
        names += _names_of(tensor, tensors)
    unique = list(dict.fromkeys(names))
    return unique[:_MAX_NAMES] or [_NATIVE]


def _names_of(tensor: torch.Tensor, own_list: list[torch.Tensor]) -> list[str]:
    names = []
    frame: types.FrameType | None
    holder: object
    for frame in sys._current_frames().values():
        names += _names_in_frames(tensor, frame)
    for holder in gc.get_referrers(tensor):
        if holder is own_list or isinstance(holder, types.FrameType):
            continue
        if isinstance(holder, dict):
            names.append(_name_in_dict(tensor, holder))
        elif isinstance(holder, (list, tuple, set)):
            names.append(f"a {type(holder).__name__} of {len(holder)}")
        else:
            names.append(_name_in_object(tensor, holder))
    frame = holder = None  # either may refer to this frame: the cycle would keep all local variables alive
    return names


def _names_in_frames(tensor: torch.Tensor, frame: types.FrameType | None) -> list[str]:
    names = []
    while frame is not None:
        if frame.f_globals.get("__name__") != __name__:
            names += [
                f"the variable {name!r} of {frame.f_code.co_name}()"
                for name, value in frame.f_locals.items()
                if value is tensor
            ]
        frame = frame.f_back
    return names


def _name_in_object(tensor: torch.Tensor, holder: object) -> str:
    """Since Python 3.13 an object holds its attributes itself, and makes a dict only for who asks."""
    kind = f"a {type(holder).__name__}"
    name = next((key for key, value in getattr(holder, "__dict__", {}).items() if value is tensor), None)
    return kind if name is None else f"the attribute {name!r} of {kind}"


def _name_in_dict(tensor: torch.Tensor, holder: dict[object, object]) -> str:
    name = next((key for key, value in holder.items() if value is tensor), "?")
    for owner in gc.get_referrers(holder):
        if getattr(owner, "__dict__", None) is holder or getattr(owner, "_buffers", None) is holder:
            return f"the attribute {name!r} of a {type(owner).__name__}"
    if "__name__" in holder:
        return f"the global {name!r} of {holder['__name__']}"
    return f"the key {name!r} of a dict"
