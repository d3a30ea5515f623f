"""keep: everything stays on the device. What others are compared with."""

from __future__ import annotations

from vdnn.planning.policies.online import OnlinePolicy, SaveFacts


class KeepAll(OnlinePolicy):
    """Nothing is offloaded."""

    @property
    def name(self) -> str:
        return "keep"

    @property
    def may_offload(self) -> bool:
        return False

    def offloads(self, save: SaveFacts) -> bool:
        return False
