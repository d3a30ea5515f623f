"""The reasons for the actions of storages, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vdnn.bytesize import format_bytes
from vdnn.planning.second_best import StorageChoice
from vdnn.report.plan_text import aligned
from vdnn.step.plan import Action

_HEADER = ("bytes", "action", "next best", "would add", "saved as")


def explanation(choices: Sequence[StorageChoice]) -> str:
    rows = [_HEADER, *(_row(choice) for choice in choices)]
    return aligned(rows, left=range(len(_HEADER)))


def choices_as_json(choices: Sequence[StorageChoice]) -> list[dict[str, Any]]:
    return [
        {
            "storage": choice.lifetime,
            "saved_as": str(choice.key),
            "bytes": choice.nbytes,
            "action": choice.action.name,
            "recompute": choice.recompute,
            "second_best": None if choice.second_best is None else choice.second_best.name,
            "more_ns": choice.more_ns,
            "would_not_fit": [action.name for action in choice.unfitting],
        }
        for choice in choices
    ]


def _row(choice: StorageChoice) -> tuple[str, ...]:
    return (
        format_bytes(choice.nbytes),
        _described(choice.action, choice),
        _second(choice),
        "" if choice.more_ns is None else added(choice.more_ns),
        str(choice.key),
    )


def added(more_ns: int) -> str:
    """The time that another action would add. A short search may find a step that takes no more time."""
    return f"{more_ns / 1e6:.3f} ms" if more_ns else "nothing"


def _second(choice: StorageChoice) -> str:
    unfitting = " and ".join(action.value for action in choice.unfitting)
    if choice.second_best is not None:
        second = _described(choice.second_best, choice)
        return f"{second} ({unfitting} would not fit)" if unfitting else second
    if unfitting:
        return f"none: {unfitting} would not fit"
    return "the step fits with it" if choice.action is Action.KEEP else "no other action fits"


def _described(action: Action, choice: StorageChoice) -> str:
    is_recomputed = action in (Action.RECOMPUTE, Action.COMPRESS)
    return f"{action.value}: {choice.recompute}" if is_recomputed else action.value
