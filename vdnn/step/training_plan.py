"""TrainingPlan: whether each parameter of a model, its gradient and its state leave the device, for a session to
follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlacedParameter:
    """One parameter of a model by its name. True: it, its gradient or its state is on the host between its uses."""

    name: str
    nbytes: int
    streams: bool = False
    gradient_leaves: bool = False
    state_leaves: bool = False


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The part of the plan of a whole training that a session follows under `budget_bytes`: the parameters of `model`,
    tied ones once. `problem` says why no session follows it, "" if one does."""

    model: str
    budget_bytes: int
    parameters: tuple[PlacedParameter, ...]
    problem: str = ""

    def difference(self, found: Mapping[str, int]) -> str:
        """The first difference from a model with these parameters and bytes; "" if there is none."""
        for one in self.parameters:
            nbytes = found.get(one.name)
            if nbytes is None:
                return f"it has a parameter {one.name}, which the model has not"
            if nbytes != one.nbytes:
                return f"its parameter {one.name} has {one.nbytes} bytes, and the model's has {nbytes}"
        known = {one.name for one in self.parameters}
        other = next((name for name in found if name not in known), None)
        return "" if other is None else f"the model has a parameter {other}, which it has not"
