"""The outcome of a run, bit for bit, and the differences of two outcomes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Outcome:
    """Everything that a run produced, by name, until its end or its error; and that error, if it raised one."""

    tensors: dict[str, Snapshot | None] = field(default_factory=dict)
    error: Exception | None = None
    # see runs.nudge; held, because the copies of dead saves would not be issued
    nudges: list[list[torch.Tensor]] = field(default_factory=list)

    def note(self, name: str, tensor: torch.Tensor | None) -> None:
        self.tensors[name] = None if tensor is None else Snapshot.of(tensor)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A tensor's geometry and the bytes of its elements: equal NaNs are equal, and the two zeros are not."""

    geometry: tuple[object, ...]
    content: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Snapshot:
        tensor = tensor.detach()
        strided = tensor.layout is torch.strided
        geometry = (tensor.layout, tensor.dtype, tuple(tensor.shape), tensor.stride() if strided else None)
        dense = (tensor if strided else tensor.to_dense()).resolve_conj().resolve_neg()
        return cls(geometry, dense.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8))

    def difference(self, other: Snapshot) -> str:
        if self.geometry != other.geometry:
            return f"geometry {self.geometry} became {other.geometry}"
        unequal = int((self.content != other.content).sum())
        return f"{unequal} of {self.content.numel()} bytes differ" if unequal else ""


def differences(plain: Outcome, other: Outcome) -> list[str]:
    """One line for each difference of `other` from `plain`."""
    if _error_text(plain) != _error_text(other):
        return [f"plain: {_error_text(plain)}; now: {_error_text(other)}"]
    if plain.tensors.keys() != other.tensors.keys():
        return [f"produced {sorted(plain.tensors)}, now {sorted(other.tensors)}"]
    lines = []
    for name, expected in plain.tensors.items():
        found = other.tensors[name]
        if expected is None or found is None:
            line = "" if expected is found else f"{_presence(expected)}, now {_presence(found)}"
        else:
            line = expected.difference(found)
        lines += [f"{name}: {line}"] if line else []
    return lines


def _presence(snapshot: Snapshot | None) -> str:
    return "no tensor" if snapshot is None else "a tensor"


def _error_text(outcome: Outcome) -> str:
    return "no error" if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
