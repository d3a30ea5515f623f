"""Runs a function of ours in place of the step of one optimizer, below torch's step hooks.

torch wraps the step of every optimizer class in a function that calls the hooks, and LR schedulers, GradScaler and
trainers wrap that once more for one optimizer, before or after a session begins. All of them end in the class's own
function, which torch's wrapper keeps in a closure. So that is the place to stand aside of all the wrappers: hooks then
run once for a step, with all parameters, whoever calls it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from types import CellType
from typing import Any

import torch

from vdnn.errors import VdnnError
from vdnn.runtime.torch_internals.cuda_graphs import keep_dynamo_out

Step = Callable[..., Any]
# A step in place of the optimizer's own, which is its first argument.
Replacement = Callable[[Step, tuple[Any, ...], dict[str, Any]], Any]

_WRAPPED = "func"  # the variable of Optimizer.profile_hook_step that holds the class's own step
_lock = threading.Lock()
_replaced: weakref.WeakKeyDictionary[torch.optim.Optimizer, Replacement] = weakref.WeakKeyDictionary()
_users: dict[Step, int] = {}  # by torch's wrapper: how many optimizers have a replacement


def _cell_of(optimizer: torch.optim.Optimizer) -> tuple[Step, CellType]:
    wrapper = type(optimizer).step
    code = getattr(wrapper, "__code__", None)
    if not getattr(wrapper, "hooked", False) or code is None or _WRAPPED not in code.co_freevars:
        raise VdnnError(
            f"{type(optimizer).__name__}.step is not wrapped by torch.optim.Optimizer, so vdnn cannot step it in "
            "slices. Let the class call Optimizer.__init__, or leave out optimizer=."
        )
    return wrapper, wrapper.__closure__[code.co_freevars.index(_WRAPPED)]  # type: ignore[index]


def replace_step(optimizer: torch.optim.Optimizer, replacement: Replacement) -> Callable[[], None]:
    """From now on a step of `optimizer` calls `replacement(own step, args, kwargs)`. Returns what undoes it."""
    wrapper, cell = _cell_of(optimizer)
    with _lock:
        if not _users.get(wrapper):
            cell.cell_contents = _dispatching(cell.cell_contents)
            _users[wrapper] = 0
        _users[wrapper] += 1
        _replaced[optimizer] = replacement

    undone = weakref.finalize(optimizer, _leave, wrapper, cell)
    undone.atexit = False
    reference = weakref.ref(optimizer)

    def undo() -> None:
        replaced = reference()
        if replaced is not None:
            _replaced.pop(replaced, None)
        undone()

    return undo


def _leave(wrapper: Step, cell: CellType) -> None:
    """Called once for each replacement: when it is undone, or when its optimizer is gone."""
    with _lock:
        _users[wrapper] -= 1
        if not _users[wrapper]:
            del _users[wrapper]
            cell.cell_contents = cell.cell_contents.__wrapped__


def _dispatching(own_step: Step) -> Step:
    @functools.wraps(own_step)
    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        replacement = _replaced.get(optimizer)
        if replacement is None:
            return own_step(optimizer, *args, **kwargs)
        return replacement(functools.partial(own_step, optimizer), args, kwargs)

    keep_dynamo_out(step)  # a compiled step would have what it reads and writes as tensors of its own
    return step
