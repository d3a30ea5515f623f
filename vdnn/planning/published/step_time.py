"""Times a step with a choice of absences on the native model of the step, for policies that try many plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vdnn import _C
from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import Gap
from vdnn.planning.search.step_model import make_step_model
from vdnn.step.plan import Absence
from vdnn.step.recording import Recording


class StepTime:
    """One recorded step over one link. `gaps` are those of gaps_of(), or some of them in the same order."""

    def __init__(self, recording: Recording, gaps: Sequence[Gap], costs: LinkCosts) -> None:
        self._model = make_step_model(recording, gaps, costs)
        self._gaps = gaps

    def outcome(self, absences: Mapping[Gap, Absence]) -> _C.StepOutcome:
        """The same answer as simulate() gives. Stalls name gaps by their index in `gaps`."""
        return self._model.replay(
            [
                (index, absences[gap].release_point, _or_none(absences[gap].reload_point))
                for index, gap in enumerate(self._gaps)
                if gap in absences
            ]
        )


def _or_none(reload_point: int | None) -> int:
    """The native core writes -1 for a reload at the use."""
    return -1 if reload_point is None else reload_point
