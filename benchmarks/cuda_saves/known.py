"""The models whose saves differ from CUDA's, each with the reason. A model that is the same does not belong here."""

from __future__ import annotations

KNOWN: dict[str, str] = {
    "lstm": "cuDNN's recurrent layers cannot run without a driver; their reserve is not translated",
}
