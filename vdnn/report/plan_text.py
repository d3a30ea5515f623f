"""Text that the reports of steps, trainings and runs share: aligned tables, the certificate."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.util import find_spec

NEEDS_SCIPY = "not certified (that needs SciPy: pip install 'vdnn[plan]')"
# A plan this close to the bound counts as the fastest: solvers have tolerances.
_IS_FASTEST = 1e-4


def aligned(
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int],
    indent: str = "",
    measured: Sequence[Sequence[str]] | None = None,
) -> str:
    """The rows as lines, with columns as wide as their longest cell. Columns in `left` are aligned left, others right.

    `measured` are the rows that decide the widths, if not all of them do.
    """
    widths = [max(map(len, column)) for column in zip(*(rows if measured is None else measured), strict=True)]
    return "\n".join(
        indent
        + "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def certificate(gap: float | None, fastest: str, limit: str = "") -> str:
    """How far a plan is from the certified bound: `gap` is a share of it, or None without a bound.

    `fastest` says which plans the bound covers, and `limit` follows the share.
    """
    if gap is None:
        return NEEDS_SCIPY if find_spec("scipy") is None else "not certified: not requested"
    if gap < _IS_FASTEST:
        return f"certified: no plan {fastest} is faster"
    return f"certified: at most {100 * gap:.2f} % above the fastest possible plan{limit}"
