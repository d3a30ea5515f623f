"""The figures of hardware as values: measured rates of this machine's link, and profiles of known cards.

A plan can be made from a profile without the card. Importing this package measures nothing and does not import torch.
`load_profile("titan-x")` reads the figures of a card, each with its source.
"""

from __future__ import annotations

from vdnn.hardware.hardware_profile import HardwareProfile
from vdnn.hardware.host_figures import HostFigures
from vdnn.hardware.link_figures import LinkFigures
from vdnn.hardware.profile_files import load_profile, profile_names

__all__ = ["HardwareProfile", "HostFigures", "LinkFigures", "load_profile", "profile_names"]
