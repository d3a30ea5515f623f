"""Chooses in how many passes a whole batch is computed fastest under a budget.

Each pass has a part of the batch. Fewer passes need more memory for activations and move parameters less often, so the
step has its least time somewhere between. Each number that divides the batch is rehearsed and planned, fewest first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from vdnn.errors import BudgetError, InvalidArgumentError
from vdnn.report.training_report import TrainingReport

AUTO = "auto"
# The search ends behind this many numbers of passes in a row that took longer than the best.
_SLOWER = 2


def numbers_of_passes(batch: int) -> list[int]:
    return [number for number in range(1, batch + 1) if batch % number == 0]


def fastest_passes(
    batch: int,
    planned: Callable[[int, int], TrainingReport],
    certified: Callable[[int, int], TrainingReport],
    on_progress: Callable[[str], None] = lambda doing: None,
) -> TrainingReport:
    """The plan of the number of passes whose step is shortest; its notes say what the others take.

    `planned(batch, passes)` plans passes of that batch each, and `certified` does the same with a certificate. If no
    number of passes fits, raises the error of the last one, which needs least.
    """
    tried: dict[int, int | None] = {}  # the time of a step; None: it does not fit
    refused: BudgetError | InvalidArgumentError | None = None
    best, slower = 0, 0
    for passes in numbers_of_passes(batch):
        on_progress(f"{passes} x {batch // passes}")
        try:
            step_ns = planned(batch // passes, passes).step_ns
        except (BudgetError, InvalidArgumentError) as error:
            tried[passes], refused = None, error
            continue
        tried[passes] = step_ns
        fastest_ns = tried.get(best)
        if fastest_ns is None or step_ns < fastest_ns:
            best, slower = passes, 0
            continue
        slower += 1
        if slower == _SLOWER:
            break
    if not best:
        raise refused or InvalidArgumentError(argument="batch", expected="1 or more", got=str(batch))
    on_progress(f"{best} x {batch // best}, the fastest")
    report = certified(batch // best, best)
    return dataclasses.replace(report, notes=(*report.notes, _note(batch, tried, best)))


def _note(batch: int, tried: dict[int, int | None], best: int) -> str:
    parts = []
    for passes, step_ns in tried.items():
        time = "does not fit" if step_ns is None else f"{step_ns / 1e6:,.1f} ms"
        parts.append(f"{passes} x {batch // passes}: {time}{' (chosen)' if passes == best else ''}")
    untried = [number for number in numbers_of_passes(batch) if number not in tried]
    rest = f"; more than {max(tried)} passes were not tried" if untried else ""
    return f"a batch of {batch} in passes: {', '.join(parts)}{rest}"
