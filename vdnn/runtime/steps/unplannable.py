"""Remembers recorded steps for which no plan meets the budget, after other steps of the session had plans.

Such a step has run already, and another one may come or not. So it ends no training: the guard does what it can,
the log says it once, and the report counts such steps. They are recorded again if less memory is resident than then.
"""

from __future__ import annotations

import logging

from vdnn.errors import BudgetError, VdnnError
from vdnn.runtime.steps.kinds import Kind
from vdnn.step.made_steps import first_save
from vdnn.step.recording import Recording, SaveKey

logger = logging.getLogger("vdnn")

_MOST_STEPS = 256


class Unplannable:
    """The steps of one session, by their kinds and the sizes of their first saves."""

    def __init__(self) -> None:
        self._resident_bytes: dict[tuple[Kind, SaveKey], int] = {}  # that are too many

    def note(self, kind: Kind, recording: Recording, error: VdnnError) -> None:
        """No plan meets the budget in this step."""
        too_many_bytes = recording.resident_bytes
        if isinstance(error, BudgetError):
            too_many_bytes -= error.least_bytes - error.budget_bytes - 1
        step = kind, first_save(recording)
        if step not in self._resident_bytes:
            logger.warning(
                "vdnn: steps that begin with the save %s get no plan, and may exceed the budget: %s", step[1], error
            )
        self._resident_bytes[step] = too_many_bytes
        if len(self._resident_bytes) > _MOST_STEPS:
            del self._resident_bytes[next(iter(self._resident_bytes))]

    def has(self, kind: Kind, first: SaveKey | None, resident_bytes: int) -> bool:
        """True if a step of this kind that begins so is over its budget under every plan, with so many bytes there."""
        known = None if first is None else self._resident_bytes.get((kind, first))
        return known is not None and resident_bytes >= known
