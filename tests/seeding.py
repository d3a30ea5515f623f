"""torch.manual_seed in a suite that calls it tens of thousands of times.

For every kind of device that is not there torch writes down the whole stack with its source, in case the device still
comes: about a millisecond, three times a call, kept for ever. That was more than half of what the identity tests took.
"""

from __future__ import annotations

import torch


def seed_only_what_is_there() -> None:
    """From now on, and for the whole process."""
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = _nothing_to_seed


def _nothing_to_seed(seed: int) -> None: ...
