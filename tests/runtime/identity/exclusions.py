"""Operations that differ from themselves: with one seed and the same bytes, plain PyTorch gives several results.

Each has its reason. Any other operation that differs between two plain runs fails its test, so nothing is left out
silently.
"""

from __future__ import annotations

from typing import Any


def why_excluded(name: str, keywords: dict[str, Any]) -> str | None:
    """Why a call of the operation that the database calls `name`, with these keyword arguments, is excluded. Else
    None."""
    if name in ("linalg_lstsq", "linalg_lstsq_grad_oriented") and keywords.get("driver") == "gelsy":
        return "LAPACK's gelsy gives several results for the same bytes, from one call to the next"
    return None
