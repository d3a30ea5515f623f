"""Sets the state of torch for a recompute: no graph, no autocast, no function modes, and the settings of the forward.

The previous state is restored whatever happens. An interrupt may come between any two instructions of Python, also
while the state is restored. So it is restored twice, and no Python frame lies between a change and the `finally`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vdnn.runtime.recompute.backend_flags import Flags, changes_to

_C: Any = torch._C
_DISABLED = _C._TorchFunctionState.ALL_DISABLED


def run_under(flags: Flags, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`run()` without graph (and so without saves), autocast, and function modes, under `flags`."""
    make, back = changes_to(flags)
    had_grad, functions = torch.is_grad_enabled(), _C._get_torch_function_state()
    autocast = _C._DisableAutocast()
    try:
        try:
            _C._set_grad_enabled(False)
            _C._set_torch_function_state(_DISABLED)
            autocast.__enter__()
            for change in make:
                change()
            return run()
        finally:
            _C._set_grad_enabled(had_grad)
            autocast.__exit__(None, None, None)
            _C._set_torch_function_state(functions)
            for change in back:
                change()
    finally:
        _C._set_grad_enabled(had_grad)
        autocast.__exit__(None, None, None)
        _C._set_torch_function_state(functions)
        for change in back:
            change()
