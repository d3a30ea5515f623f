"""vdnn-conv: what convolutions save leaves the device (vDNN_conv of Rhu et al., MICRO 2016).

A convolution computes long enough on its input to hide the copy; cheap layers do not. Seen by module: a convolution
called as a function outside an nn.Module is not recognised, and its saves stay.
"""

from __future__ import annotations

from vdnn.planning.policies.online import OnlinePolicy, SaveFacts


class VdnnConv(OnlinePolicy):
    """Only saves made while a convolution module runs."""

    @property
    def name(self) -> str:
        return "vdnn-conv"

    def offloads(self, save: SaveFacts) -> bool:
        return save.is_conv
