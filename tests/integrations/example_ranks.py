"""The example of FSDP2 over several processes, plain and in sessions: a job for tests.integrations.ranks."""

from __future__ import annotations

from typing import Any

from tests.integrations.example_programs import Trained


def long_texts(rank: int) -> dict[str, Any]:
    options: dict[str, Any] = {"budget": "min", "tokens": 256, "steps": 5}
    plain, ours = Trained("fsdp2_long", is_plain=True, **options), Trained("fsdp2_long", **options)
    return {
        "differing": ours.differs_from(plain),
        "offloaded": ours.count(r"offloaded (\d+) storages"),
        "followed": "follows a plan by auto" in ours.report,
    }
