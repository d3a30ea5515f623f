"""vdnn-all: every eligible storage leaves the device (vDNN_all of Rhu et al., MICRO 2016)."""

from __future__ import annotations

from vdnn.planning.policies.online import OnlinePolicy, SaveFacts


class VdnnAll(OnlinePolicy):
    """The least device memory, and the most traffic."""

    @property
    def name(self) -> str:
        return "vdnn-all"

    @property
    def offloads_everything(self) -> bool:
        return True

    def offloads(self, save: SaveFacts) -> bool:
        return True
