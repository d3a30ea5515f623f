"""Decides where a session's steps end, by what optimizers and graphs do.

As long as no optimizer was seen, a step ends when a save comes after uses and no graph holds anything any more: that
holds under gradient accumulation, several forwards before backwards and pipelines alike. None ends inside of a
backward, where checkpoints save and optimizers may step.

With optimizers a step is over once one has stepped in it, and the backward, if that is where it stepped, is over. What
the step saved may outlive that: a generator's graph that is made before its critic's optimizer steps and used after it,
or an output that is kept until the next step writes over it. The two look alike when the optimizer steps, so:

* As long as one optimizer alone steps, or nothing that was saved before an optimizer's step was used after it, a step
  ends there, whatever lives on.
* Otherwise the session waits for the graphs: from then on a step ends at the first optimizer's step, save or exit
  outside of a backward at which all that it saved is gone.
* Waiting may be in vain. When the same optimizer steps again in one step, and something that was saved since it last
  did is still alive, graphs outlive steps; then a step also ends with the optimizer that stepped right before that one,
  the last of the cycle. A step in which optimizers stepped `_MOST_ROUNDS` times with saves between ends in any case.
"""

from __future__ import annotations

import weakref
from enum import Enum

import torch

from vdnn.runtime.storage.managed_storage import ManagedStorage

# A critic may step ten times on one graph of its generator; a graph that lives for ever must not make a step of all.
_MOST_ROUNDS = 12

_NO_GRAPH_TASK = -1

Alive = dict[int, weakref.ref[ManagedStorage]]  # by lifetime


class Found(Enum):
    """What an optimizer's step says of the steps so far."""

    NOTHING = "nothing new"
    WERE_CUT = "what ended steps until now may have cut them in pieces"
    WERE_JOINED = "the step that is running is more than one: their graphs outlive them"


def in_backward() -> bool:
    """Whether this thread runs one."""
    return torch._C._current_graph_task_id() != _NO_GRAPH_TASK


class StepEnds:
    """Of one session. Lifetimes are numbered in each step in the order of their first saves."""

    def __init__(self) -> None:
        self._only: int | None = None  # the id of the optimizer that was seen
        self._are_several = False
        self._has_cut = False  # an end that came with an optimizer's step while graphs of the step were alive
        self._is_cut_used = False
        self._waits = False
        self._last_of_cycle: int | None = None
        self._begin()

    def _begin(self) -> None:
        self.alive: Alive = {}  # of the step
        self._is_pending = False  # an optimizer has stepped
        self._are_joined = False  # several steps, as was found out
        self._is_last = False  # the last of its cycle was among them
        self._ran: dict[int, int] = {}  # optimizer -> how many lifetimes there were when it last stepped
        self._latest: int | None = None
        self._rounds = 0
        self._saved_since = False

    def step_ended(self) -> list[ManagedStorage]:
        """What the step has saved that outlives it."""
        outliving = [managed for reference in list(self.alive.values()) if (managed := reference()) is not None]
        self._has_cut |= self._is_pending and bool(outliving)
        self._begin()
        return outliving

    def used_another(self) -> None:
        """What an earlier step saved is used."""
        self._is_cut_used |= self._has_cut

    def optimizer_stepped(self, optimizer: int, lifetimes: int) -> Found:
        """`optimizer` is its id; `lifetimes` how many the step has so far."""
        found = Found.NOTHING
        if self._only is None:
            self._only = optimizer
            found = Found.WERE_CUT
        self._are_several |= optimizer != self._only
        if self._are_several and self._is_cut_used and not self._waits:
            self._waits = True
            found = Found.WERE_CUT
        if self._waits and not self._are_joined and self._outlives(optimizer):
            self._are_joined = True
            self._last_of_cycle = self._latest
            found = Found.WERE_JOINED
        self._is_pending = True
        self._is_last |= optimizer == self._last_of_cycle
        self._ran[optimizer] = lifetimes
        self._latest = optimizer
        self._rounds += self._saved_since
        self._saved_since = False
        return found

    def _outlives(self, optimizer: int) -> bool:
        since = self._ran.get(optimizer)
        return since is not None and any(lifetime >= since for lifetime in list(self.alive))

    def is_due(self) -> bool:
        """Whether the step is over here, because of an optimizer that stepped."""
        if not self._is_pending or in_backward():
            return False
        return not self.alive or not self._waits or self._is_last or self._rounds >= _MOST_ROUNDS

    def is_due_before_save(self, *, graphs_are_gone: bool) -> bool:
        """Whether it is over before this save: for one of the next it is."""
        if in_backward():
            return False
        if self.is_due():
            return True
        self._saved_since = True
        return graphs_are_gone and self._only is None
