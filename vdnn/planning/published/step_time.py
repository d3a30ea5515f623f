"""What a step takes with some gaps used, from the native model of the step: for policies that try many plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vdnn import _C
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import Gap
from vdnn.planning.search.step_model import make_step_model
from vdnn.step.plan import Absence
from vdnn.step.recording import Recording


class StepTime:
    """Of one recorded step over one link. Gaps are as gaps_of() gives them, or some of those in the same order."""

    def __init__(self, recording: Recording, gaps: Sequence[Gap], costs: LinkCosts) -> None:
        self._model = make_step_model(recording, gaps, costs)
        self._gaps = gaps

    def outcome(self, absences: Mapping[Gap, Absence]) -> _C.StepOutcome:
        """As simulate() would have it. Stalls name gaps by their place."""
        return self._model.replay(
            [
                (place, absences[gap].release_point, _or_none(absences[gap].reload_point))
                for place, gap in enumerate(self._gaps)
                if gap in absences
            ]
        )


def _or_none(reload_point: int | None) -> int:
    """The native core writes -1 for: when it is used."""
    return -1 if reload_point is None else reload_point
