"""The steps of a session that watches none: they are counted, and nothing else is known of them.

It answers the hooks as StepWatch does, so that watched and unwatched saves take one path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from vdnn.runtime.recompute.codecs import LOSSLESS
from vdnn.runtime.recompute.recompute_cost import RecomputeCost
from vdnn.runtime.steps.watch import StepWatch
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.transport import Transport
from vdnn.step.plan import Action
from vdnn.step.recording import SaveKey

_NOTHING = contextlib.nullcontext()


class UnwatchedSteps:
    """The steps of one session. A step ends at session.step() or at an optimizer's step.

    With `recomputes`, every storage is recomputed that can be; the policy decides about the others.
    """

    is_watching = False
    looks_for_recomputes = False
    codecs = LOSSLESS
    settling = budget = gauges = recording = plan = plan_use = timeline = first_difference = save_key = None
    save_form = None
    follows_stored_plan = False
    stored_lines: tuple[str, ...] = ()

    def __init__(self, on_step_end: Callable[[], None], *, recomputes: bool) -> None:
        self.steps = 0  # the number of finished steps
        self.recomputes = recomputes
        self._action = Action.RECOMPUTE if recomputes else None
        self._on_step_end = on_step_end

    def predicted(self) -> None:
        """Nothing was planned."""

    def store_plans(self) -> None:
        """There are none."""

    def forget_stored_plans(self) -> None:
        """There are none."""

    def resumed(self) -> None:
        """Does nothing: nothing is measured."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.end_step()

    def end_step(self) -> None:
        self.steps += 1
        self._on_step_end()

    def end_step_if_graphs_are_gone(self) -> None:
        """Does nothing: nobody counts the graphs."""

    # Called in the hooks.

    def hook(self, transport: Transport) -> AbstractContextManager[object]:
        return _NOTHING

    def recomputing(self, transport: Transport) -> AbstractContextManager[None]:
        return _NOTHING

    def saved(self, managed: ManagedStorage, tensor: torch.Tensor, *, is_new: bool) -> Action | None:
        """The action for a storage at its first save; None if the policy decides."""
        return self._action if is_new else None

    def encoded(self, managed: ManagedStorage, key: SaveKey) -> Action | None:
        return None

    def can_be_recomputed(
        self, managed: ManagedStorage, operation: str, inputs: list[ManagedStorage], cost: RecomputeCost
    ) -> None:
        """Does nothing: there is no recording."""

    def has_room_for_trial(self, transport: Transport, nbytes: int) -> bool:
        """There is no budget."""
        return True

    def make_room_for_trial(self, transport: Transport, nbytes: int) -> bool:
        """There is no budget."""
        return True

    def cannot_be_recomputed(self, managed: ManagedStorage) -> None:
        """Does nothing: there is no recording."""


Steps = StepWatch | UnwatchedSteps
