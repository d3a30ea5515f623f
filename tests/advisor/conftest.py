"""Lets the tests of the advisor change settings of torch."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def settings_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own test utilities, which other tests import, lock the flags of backends."""
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
