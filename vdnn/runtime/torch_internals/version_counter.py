"""Checks for in-place writes between save and use, as autograd does: saved-tensor hooks turn autograd's check off.

[Note: Versions] Every in-place write increments the version counter of a tensor, which its views share. A save
remembers the version; a use that finds another version raises autograd's error. `x.detach()` shares the counter of `x`,
but `x.data` has a new counter for the same bytes. So (storage, version) does not identify the bytes. The runtime
keeps the counter itself alive, by a tensor without bytes that shares it: the witness.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vdnn.runtime.torch_internals.tensor_kinds import PLAIN_CLASSES

_empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}  # tensors of zero bytes, shared by all witnesses
set_versions = torch._C._autograd._unsafe_set_version_counter


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that shares `tensor`'s version counter and holds none of its bytes."""
    witness = tensor.detach()
    if type(tensor) is FakeTensor:
        witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return witness
    if type(tensor) not in PLAIN_CLASSES:  # a DTensor: its counter is the wrapper's
        witness._local_tensor = torch.empty(0)  # type: ignore[attr-defined]
        return witness
    empty = _empty.get((tensor.dtype, tensor.device))  # no call of ours: this runs at every save
    witness.data = empty_of(tensor.dtype, tensor.device) if empty is None else empty
    return witness


def empty_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zero bytes, always the same for one dtype and device."""
    key = (dtype, device)
    empty = _empty.get(key)
    if empty is None:
        empty = _empty[key] = torch.empty(0, dtype=dtype, device=device)
    return empty


def same_counter(witness: torch.Tensor, tensor: torch.Tensor) -> bool:
    """True if the two share one counter: only then does setting one version change the other."""
    version = tensor._version
    if witness._version != version:
        return False
    # One call increments and restores a shared counter: a thread that read it in between, in autograd or here, would
    # take the tensor for modified.
    set_versions((witness, tensor), (version + 1, version))
    if witness._version == version:
        return True
    set_versions((witness,), (version,))
    return False


def raise_modified(kind: str, shape: tuple[int, ...], found: int, expected: int) -> None:
    """Raises autograd's error with the same text, so that people and programs recognize it."""
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{_as_autograd_calls(kind)} {list(shape)}] is at version {found}; expected version {expected} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


def _as_autograd_calls(kind: str) -> str:
    """The type name in autograd's message, for a result of tensor.type(). Dtypes newer than the old type names have
    another form."""
    *prefix, name = kind.removesuffix("Tensor").split(".")
    if name in _OLD_TYPE_NAMES:
        return kind
    return f"{prefix[1].upper() if len(prefix) > 1 else 'CPU'}{name}Type"


_OLD_TYPE_NAMES = ("Byte", "Char", "Short", "Int", "Long", "Half", "Float", "Double")
