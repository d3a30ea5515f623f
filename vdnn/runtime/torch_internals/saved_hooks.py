"""Asks torch which saved-tensor hooks this thread has entered last."""

from __future__ import annotations

import torch

_top = torch._C._autograd._top_saved_tensors_default_hooks


def top_hooks_are(hooks: torch.autograd.graph.saved_tensors_hooks) -> bool:
    """True if these are the innermost hooks, so that leaving them removes them and no others."""
    found: object = _top(True)  # torch's stub says that it is always a pair
    return isinstance(found, tuple) and found[0] is hooks.pack_hook and found[1] is hooks.unpack_hook
