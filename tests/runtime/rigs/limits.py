"""Options of a session with its limits beside the others, so that a test overrides one limit and leaves the rest."""

from __future__ import annotations

from typing import Any

from vdnn.runtime.session.limits import LIMITS, Limits


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of vdnn.offload for `options`, in which each limit has an entry of its own."""
    rest = {name: value for name, value in options.items() if name not in LIMITS}
    return {**rest, "limits": Limits(**{name: options[name] for name in LIMITS if name in options})}
