"""Refuses a step that cannot fit its budget, when it begins: from its first save and the steps recorded so far.

It refuses only what is over the budget by an estimate that is no larger than the step (vdnn/step/lower_estimate.py).
All other steps run, under a plan or the guard.
"""

from __future__ import annotations

from vdnn.errors import BudgetError
from vdnn.planning.least_memory import require_feasible_budget
from vdnn.runtime.steps.earlier_graphs import naming_earlier_graphs
from vdnn.runtime.steps.ladder import Ladder
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.step.lower_estimate import lower_estimate
from vdnn.step.made_steps import first_save, with_resident
from vdnn.step.recording import SaveKey


def require_foreseen_fit(
    planner: BudgetPlanner, ladder: Ladder, first: SaveKey, resident_bytes: int, earlier_bytes: int
) -> None:
    """Raises BudgetError if a step of this ladder's kind that begins with `first` is over the budget under every plan.
    `resident_bytes` are allocated as it begins, of which graphs of earlier steps hold `earlier_bytes`."""
    # If first saves do not tell the sizes of steps, nothing is foreseen.
    ends = None if ladder.records_all else ladder.recorded.ends
    if ends is None or not ladder.rungs or any(rung.serves(first) for rung in ladder.rungs):
        return
    # Memory that was allocated between the two recordings is not growth of the step.
    small, large = (with_resident(one, resident_bytes) for one in ends)
    estimate = lower_estimate(small, large, first)
    budget_bytes = planner.fixed_bytes(large.device_bytes)
    if estimate is None or budget_bytes is None:
        return
    try:
        require_feasible_budget(estimate, budget_bytes)
    except BudgetError as error:
        least_bytes, where = error.least_bytes, error.where
    else:
        return
    recorded = " and ".join(str(list(first_save(one).size)) for one in (small, large))
    foreseen = BudgetError(
        budget_bytes=budget_bytes,
        least_bytes=least_bytes,
        where=where,
        resident_bytes=resident_bytes,
        foreseen=f"The step has only begun: its first save is {list(first.size)}. The estimate is from recorded steps "
        f"with first saves of {recorded}; steps with up to {list(ladder.rungs[-1].first.size)} have plans",
    )
    raise naming_earlier_graphs(foreseen, earlier_bytes) if earlier_bytes else foreseen
