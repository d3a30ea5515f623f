"""A linear program as it is written down row by row, and its least value, found by HiGHS through SciPy.

Columns are numbers from 0 to 1, but for the unbounded ones, which have no upper limit. With whole numbers what is asked
for is a lower bound of the least value, which the solver knows long before it knows the least itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vdnn.errors import VdnnError

Terms = Sequence[tuple[int, float]]  # columns and factors


class LinearProgram:
    """`columns` are those that there are so far."""

    def __init__(self) -> None:
        self.columns = 0
        self._entries: list[tuple[int, int, float]] = []  # row, column, factor
        self._least: list[float] = []  # of each row
        self._unbounded: list[int] = []

    def require(self, terms: Terms, least: float) -> None:
        """The sum of these is at least so much."""
        self._entries += [(len(self._least), column, factor) for column, factor in terms]
        self._least.append(least)

    def new_columns(self, count: int, *, is_bounded: bool = True) -> range:
        self.columns += count
        added = range(self.columns - count, self.columns)
        if not is_bounded:
            self._unbounded += added
        return added

    def least_of(self, column: int, nodes: int | None) -> float | None:
        """Of all that the rows allow. With `nodes` all bounded columns are whole, so many of the solver's tree are
        looked at, and None says that it was stopped before it knew anything."""
        scipy = _scipy()
        rows, columns, factors = zip(*self._entries, strict=True)
        matrix = scipy.sparse.csr_matrix((factors, (rows, columns)), shape=(len(self._least), self.columns))
        upper, integrality = [1.0] * self.columns, [int(nodes is not None)] * self.columns
        for one in self._unbounded:
            upper[one], integrality[one] = float("inf"), 0
        objective = [0.0] * self.columns
        objective[column] = 1.0
        solution = scipy.optimize.milp(
            objective,
            constraints=scipy.optimize.LinearConstraint(matrix, lb=self._least),
            bounds=scipy.optimize.Bounds([0.0] * self.columns, upper),
            integrality=integrality,
            options={} if nodes is None else {"node_limit": nodes},
        )
        least: float | None = solution.fun if nodes is None else solution.mip_dual_bound
        if least is None and nodes is None:
            raise VdnnError(f"bound: the solver gave up: {solution.message}")
        return least


def _scipy() -> Any:
    """Imported late: only who asks for a bound needs it."""
    try:
        import scipy.optimize
        import scipy.sparse
    except ImportError:
        raise VdnnError("the bound of a plan needs SciPy, which is not installed: pip install 'vdnn[plan]'.") from None
    return scipy
