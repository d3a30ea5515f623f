"""recompute-all: discards every storage that can be recomputed from other saves, and offloads the rest.

It needs the least memory of all policies without a plan, but the step is far from the shortest: storages that are
expensive to recompute are recomputed too.
"""

from __future__ import annotations

from vdnn.planning.policies.online import OnlinePolicy, SaveFacts


class RecomputeAll(OnlinePolicy):
    """An online policy, without a recording. `auto` chooses what to recompute."""

    @property
    def name(self) -> str:
        return "recompute-all"

    @property
    def offloads_everything(self) -> bool:
        return True

    @property
    def recomputes(self) -> bool:
        return True

    @property
    def is_repeatable(self) -> bool:
        return True

    def offloads(self, save: SaveFacts) -> bool:
        return True
