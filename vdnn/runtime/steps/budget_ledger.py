"""Counts the steps of a session that kept to the budget and those that exceeded it, with the causes.

A step's peak is what was allocated between its first hook and its end. The first step over the budget for each cause is
logged; the report has all of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from enum import Enum

from vdnn.bytesize import format_bytes

logger = logging.getLogger("vdnn")


class Over(Enum):
    """Why a step took more than its budget."""

    NO_PLAN = "ran before there was a plan for it"
    ANOTHER_PLAN = "followed the plan of another kind of step"
    DIFFERED = "differed from its plan"
    MORE_THAN_PLANNED = "took more than its plan says"
    TOO_LARGE = "needs more than the budget even with everything offloaded"
    PASSED_THROUGH = "saved only tensors that pass through, such as those of unknown subclasses, which no session moves"
    EARLIER_GRAPHS = "began with graphs of earlier steps that are still held and cannot be offloaded"


class BudgetLedger:
    """The steps of one session that have a budget and a count of memory."""

    def __init__(self) -> None:
        self.steps = 0
        self.budget_bytes = 0  # of the last step
        self.worst_bytes = 0
        self.over: Counter[Over] = Counter()
        self._worst: tuple[int, int, Over] | None = None  # of the running step

    def micro_batch_ended(self, peak_bytes: int, budget_bytes: int, cause: Over) -> None:
        """Note a part of the running step, or all of it. `cause` is why it exceeded its budget, if it did."""
        if self._worst is None or peak_bytes > self._worst[0]:
            self._worst = peak_bytes, budget_bytes, cause

    def step_ended(self) -> None:
        """Note a finished step, if it had a budget."""
        if self._worst is None:
            return
        (peak_bytes, budget_bytes, cause), self._worst = self._worst, None
        self.steps += 1
        self.budget_bytes = budget_bytes
        if peak_bytes <= budget_bytes:
            return
        self.worst_bytes = max(self.worst_bytes, peak_bytes)
        self.over[cause] += 1
        if self.over[cause] == 1:
            logger.warning(
                "vdnn: a step took %s, %s more than its budget: it %s. session.report() counts such steps.",
                format_bytes(peak_bytes),
                format_bytes(peak_bytes - budget_bytes),
                cause.value,
            )

    def lines(self) -> list[str]:
        """For the report; nothing before the first step."""
        if not self.steps:
            return []
        budget, over = format_bytes(self.budget_bytes), self.over.total()
        if not over:
            return [f"  budget {budget}: all of {self.steps} steps within"]
        causes = "; ".join(f"{count} {cause.value}" for cause, count in self.over.most_common())
        return [
            f"  budget {budget}: {self.steps - over} of {self.steps} steps within, {over} over, worst "
            f"{format_bytes(self.worst_bytes)} ({causes})"
        ]
