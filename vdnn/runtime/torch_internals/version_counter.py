"""The check that autograd makes of in-place writes, made here because hooks turn it off.

[Note: Versions] A tensor's version counter grows with every in-place write, and views share it. A save remembers the
version; a use that finds another raises what autograd would have raised. `x.data` and `x.detach()` differ: the former
starts a counter of its own on the same bytes. So (storage, version) is no identity: the counter itself is held, by a
tensor without bytes that shares it.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vdnn.runtime.torch_internals.tensor_kinds import PLAIN_CLASSES

_empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}  # no bytes each, so they may be shared
_set_versions = torch._C._autograd._unsafe_set_version_counter


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that shares `tensor`'s version counter and holds none of its bytes."""
    witness = tensor.detach()
    if type(tensor) is FakeTensor:
        witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return witness
    if type(tensor) not in PLAIN_CLASSES:  # a DTensor: its counter is the wrapper's
        witness._local_tensor = torch.empty(0)  # type: ignore[attr-defined]
        return witness
    place = (tensor.dtype, tensor.device)
    empty = _empty.get(place)
    if empty is None:
        empty = _empty[place] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    witness.data = empty
    return witness


def same_counter(witness: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether the two share one counter: only then does moving one move the other."""
    version = tensor._version
    if witness._version != version:
        return False
    # One call moves it and puts it back: another thread that saw a shared counter in between, in autograd or here,
    # would take the tensor for modified.
    _set_versions((witness, tensor), (version + 1, version))
    if witness._version == version:
        return True
    _set_versions((witness,), (version,))
    return False


def raise_modified(kind: str, shape: tuple[int, ...], found: int, expected: int) -> None:
    """In autograd's own words, so that code and people that know them recognise the error."""
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{_as_autograd_calls(kind)} {list(shape)}] is at version {found}; expected version {expected} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


def _as_autograd_calls(kind: str) -> str:
    """What tensor.type() says, as that message has it: dtypes younger than the old type names go by another one."""
    *place, name = kind.removesuffix("Tensor").split(".")
    if name in _OLD_TYPE_NAMES:
        return kind
    return f"{place[1].upper() if len(place) > 1 else 'CPU'}{name}Type"


_OLD_TYPE_NAMES = ("Byte", "Char", "Short", "Int", "Long", "Half", "Float", "Double")
