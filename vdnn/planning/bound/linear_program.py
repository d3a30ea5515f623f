"""A linear program that is written row by row and minimized by HiGHS through SciPy.

A column is a variable from 0 to 1, or from 0 without an upper limit if it is unbounded. If some are integers, the
answer is a lower bound of the minimum, which the solver knows long before it knows the minimum itself. Without SciPy,
least_of() raises VdnnError.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from vdnn.errors import LibraryMissingError, VdnnError

Terms = Sequence[tuple[int, float]]  # columns and factors


class LinearProgram:
    """`columns` is the number of columns so far. `values` are theirs in the last solution."""

    def __init__(self) -> None:
        self.columns = 0
        self.values: list[float] = []
        self._entries: list[tuple[int, int, float]] = []  # row, column, factor
        self._least: list[float] = []  # of each row
        self._unbounded: list[int] = []

    def require(self, terms: Terms, least: float) -> None:
        """Adds a row: the sum of `terms` is at least `least`."""
        self._entries += [(len(self._least), column, factor) for column, factor in terms]
        self._least.append(least)

    def new_columns(self, count: int, *, is_bounded: bool = True) -> range:
        self.columns += count
        added = range(self.columns - count, self.columns)
        if not is_bounded:
            self._unbounded += added
        return added

    def bounded_columns(self) -> set[int]:
        return set(range(self.columns)).difference(self._unbounded)

    def least_of(self, column: int, whole: Collection[int] = (), nodes: int = 0) -> float | None:
        """The least value of `column` that the rows allow. The columns `whole` are integers; with any, the solver stops
        after `nodes` nodes of its tree. None if it stopped before it had a bound."""
        scipy = _scipy()
        rows, columns, factors = zip(*self._entries, strict=True)
        matrix = scipy.sparse.csr_matrix((factors, (rows, columns)), shape=(len(self._least), self.columns))
        upper, integrality = [1.0] * self.columns, [0] * self.columns
        for one in self._unbounded:
            upper[one] = float("inf")
        for one in whole:
            integrality[one] = 1
        objective = [0.0] * self.columns
        objective[column] = 1.0
        solution = scipy.optimize.milp(
            objective,
            constraints=scipy.optimize.LinearConstraint(matrix, lb=self._least),
            bounds=scipy.optimize.Bounds([0.0] * self.columns, upper),
            integrality=integrality,
            options={"node_limit": nodes} if whole else {},
        )
        least: float | None = solution.mip_dual_bound if whole else solution.fun
        if least is None and not whole:
            raise VdnnError(f"bound: expected a solution of the linear program, got none: {solution.message}")
        self.values = [] if solution.x is None else [float(value) for value in solution.x]
        return least


def _scipy() -> Any:
    """Imports SciPy when a bound is asked for, so that nothing else needs it."""
    try:
        import scipy.optimize
        import scipy.sparse
    except ImportError:
        raise LibraryMissingError(what="the bound of a plan", library="scipy", extra="plan") from None
    return scipy
