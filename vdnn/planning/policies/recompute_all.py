"""rebuild-all: what can be made again from something else that is saved is given up; the rest leaves the device.

The least memory that needs no plan, and by far not the shortest step: what is dear to rebuild is rebuilt all the same.
"""

from __future__ import annotations

from vdnn.planning.policies.online import OnlinePolicy, SaveFacts


class RebuildAll(OnlinePolicy):
    """Without a recording; `auto` chooses what to rebuild."""

    @property
    def name(self) -> str:
        return "rebuild-all"

    @property
    def offloads_everything(self) -> bool:
        return True

    @property
    def rebuilds(self) -> bool:
        return True

    def offloads(self, save: SaveFacts) -> bool:
        return True
