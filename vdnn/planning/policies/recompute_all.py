"""recompute-all: what can be made again from something else that is saved is given up; the rest leaves the device.

The least memory that needs no plan, and by far not the shortest step: what is dear to recompute is recomputed all the
same.
"""

from __future__ import annotations

from vdnn.planning.policies.online import OnlinePolicy, SaveFacts


class RecomputeAll(OnlinePolicy):
    """Without a recording; `auto` chooses what to recompute."""

    @property
    def name(self) -> str:
        return "recompute-all"

    @property
    def offloads_everything(self) -> bool:
        return True

    @property
    def recomputes(self) -> bool:
        return True

    def offloads(self, save: SaveFacts) -> bool:
        return True
