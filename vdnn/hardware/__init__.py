"""What hardware can do, as values: what was measured here, and profiles of known cards for planning without one.

Nothing here measures or imports torch. `load_profile("titan-x")` reads a card's figures, each with its source.
"""

from __future__ import annotations

from vdnn.hardware.hardware_profile import HardwareProfile
from vdnn.hardware.link_figures import LinkFigures
from vdnn.hardware.profile_files import load_profile, profile_names

__all__ = ["HardwareProfile", "LinkFigures", "load_profile", "profile_names"]
