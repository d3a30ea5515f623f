"""Lets gradients that DistributedDataParallel reduces leave once they are reduced.

[Note: When DDP has reduced] DDP copies a gradient into its bucket behind the hook in which gradients leave otherwise,
and writes the reduced one where it was in a callback at the end of the backward. It queues that callback with the last
bucket. A callback that was queued before runs before it: ours queues a second one, which runs behind DDP's. This holds
for every communication hook, under no_sync(), and with a static graph, whose first reduction is in such a callback.
FSDP2 calls the hooks of a shard while it still holds what it reduced, so those leave behind the backward, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from vdnn.runtime.torch_internals.backward_ends import call_after_backward, graph_task, in_nested_backward

Take = Callable[[Iterable[torch.Tensor]], object]


class ReducedGradients:
    """Those of `parameters` that DDP reduces, and those whose reduced gradient has not left. `bring_back` and
    `take_away` move gradients."""

    def __init__(self, parameters: Sequence[torch.Tensor], bring_back: Callable[[], object], take_away: Take) -> None:
        self._parameters = parameters
        self._bring_back = bring_back
        self._take_away = take_away
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._ids: set[int] = set()  # of parameters
        self._waiting: dict[int, torch.Tensor] = {}  # parameters by id
        self._task: int | None = None  # the backward behind which the waiting ones leave

    def watch(self) -> Callable[[], object]:
        """Hears of calls of modules under DDP from now on. Returns what undoes it."""
        handle: Any = torch.nn.modules.module.register_module_forward_pre_hook(self._before)
        return handle.remove  # type: ignore[no-any-return]

    def _before(self, module: torch.nn.Module, args: object) -> None:
        if not isinstance(module, DistributedDataParallel):
            return
        if module not in self._modules:
            self._modules.add(module)
            self._ids.update(map(id, module.parameters()))
        may_skip = module.find_unused_parameters or module.static_graph
        if may_skip and torch.is_grad_enabled() and module.require_backward_grad_sync:
            self._bring_back()  # DDP reduces the sum of a parameter that this backward does not reach, too
            self._waiting.update((id(one), one) for one in self._parameters if self.has(one))

    def has(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def leave_later(self, parameter: torch.Tensor) -> None:
        """The gradient of `parameter` leaves behind the running backward."""
        self._waiting[id(parameter)] = parameter
        task = graph_task()
        if task != self._task and call_after_backward(self._behind_others):
            self._task = task

    def _behind_others(self) -> None:
        call_after_backward(self._leave)

    def _leave(self) -> None:
        if in_nested_backward():
            return  # a checkpoint's: the reduction belongs to the outer one
        self._task = None
        waiting, self._waiting = list(self._waiting.values()), {}
        self._take_away(waiting)
