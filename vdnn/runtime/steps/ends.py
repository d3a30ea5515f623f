"""Decides where a session's steps end, from the steps of optimizers and the lifetimes of graphs.

Until an optimizer has stepped, a step ends at a save that follows uses, once no graph holds a saved tensor any more.
That is right for gradient accumulation, several forwards before their backwards, and pipelines. No step ends inside a
backward, where checkpoints save and optimizers may step.

With optimizers a step is over once an optimizer has stepped in it and, if it stepped inside a backward, that backward
is over. Saves of the step may live longer: the graph of a generator, made before its critic's optimizer steps and used
after that; or an output that is kept until the next step overwrites it. When the optimizer steps, the two look alike:

* As long as only one optimizer steps, or no save from before an optimizer's step is used after it, a step ends at the
  optimizer's step, whatever is still alive.
* Otherwise the session waits for the graphs: from then on a step ends at the first optimizer's step, save or exit
  outside a backward at which all of its saves are freed.
* The graphs may never be freed. If the same optimizer steps again in one step, and a save since its previous step is
  still alive, graphs outlive steps. Then a step also ends with the optimizer that stepped right before that one, the
  last of the cycle. A step in which optimizers stepped `_MOST_ROUNDS` times with saves between ends in any case.
"""

from __future__ import annotations

import weakref
from enum import Enum

from vdnn import _C
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.torch_internals.backward_ends import in_backward

# A critic may step ten times on one graph of its generator; a graph that is never freed must not join all steps.
_MOST_ROUNDS = 12


Alive = dict[int, weakref.ref[ManagedStorage]]  # by lifetime


class Found(Enum):
    """The conclusion from an optimizer's step about the steps so far."""

    NOTHING = "nothing new"
    STEPS_WERE_SPLIT = "the steps so far may have been parts of steps"
    STEPS_WERE_MERGED = "the running step is several steps, whose graphs outlive them"


class StepEnds:
    """One session's rule. Lifetimes are numbered in each step in the order of their first saves."""

    def __init__(self) -> None:
        self._first_optimizer: int | None = None  # the id of the first that was seen
        self._has_several = False
        self._has_cut = False  # an optimizer's step ended a step while graphs of the step were alive
        self._is_cut_used = False
        self._waits_for_graphs = False
        self._last_of_cycle: int | None = None
        self._living = 0  # the number of live lifetimes, of this step and of earlier ones
        self._gate: _C.Gate | None = None  # it keeps saves of its own, of this step or of earlier ones
        self._begin()

    def _begin(self) -> None:
        self.alive: Alive = {}  # the saves of the step that are alive
        self._serves_step = False  # the gate keeps saves of this step
        self._is_pending = False  # an optimizer has stepped
        self._is_joined = False  # it is several steps
        self._last_has_stepped = False  # the last optimizer of the cycle has stepped
        self._lifetimes_at_step: dict[int, int] = {}  # optimizer -> the number of lifetimes when it last stepped
        self._latest_optimizer: int | None = None
        self._rounds = 0
        self._saved_since = False

    def forget_gate(self) -> None:
        """The gate no longer keeps saves of this step."""
        self._gate = None

    def keeps_natively(self, gate: _C.Gate) -> None:
        """From now on the gate keeps saves of this step."""
        self._gate, self._serves_step = gate, True

    @property
    def living(self) -> int:
        """The number of saved storages that are alive, of this step and of earlier ones."""
        return self._living + (0 if self._gate is None else self._gate.living)

    @property
    def waits_for_graphs(self) -> bool:
        return self._waits_for_graphs

    def _alive_now(self) -> list[int]:
        """The lifetimes of the step that are alive."""
        return [*self.alive, *(self._gate.alive() if self._gate is not None and self._serves_step else ())]

    def lifetime_began(self, lifetime: int, managed: ManagedStorage) -> Alive:
        """Counts a lifetime. Returns the living saves of its step, from which `lifetime_ended` removes it."""
        self._living += 1
        self.alive[lifetime] = managed.reference
        return self.alive

    def lifetime_ended(self, lifetime: int, alive: Alive) -> None:
        """Called on any thread, also for a lifetime of an earlier step."""
        self._living -= 1
        alive.pop(lifetime, None)

    def step_ended(self) -> list[ManagedStorage]:
        """End the step. Returns its storages that are still alive."""
        outliving = [managed for reference in list(self.alive.values()) if (managed := reference()) is not None]
        self._has_cut |= self._is_pending and bool(outliving or self._alive_now())
        self._begin()
        return outliving

    def used_earlier_save(self) -> None:
        """Notes a use of a save of an earlier step."""
        self._is_cut_used |= self._has_cut

    def optimizer_stepped(self, optimizer: int, lifetimes: int) -> Found:
        """`optimizer` is the optimizer's id; `lifetimes` is the number of lifetimes of the step so far."""
        found = Found.NOTHING
        if self._first_optimizer is None:
            self._first_optimizer = optimizer
            found = Found.STEPS_WERE_SPLIT
        self._has_several |= optimizer != self._first_optimizer
        if self._has_several and self._is_cut_used and not self._waits_for_graphs:
            self._waits_for_graphs = True
            found = Found.STEPS_WERE_SPLIT
        if self._waits_for_graphs and not self._is_joined and self._outlives(optimizer):
            self._is_joined = True
            self._last_of_cycle = self._latest_optimizer
            found = Found.STEPS_WERE_MERGED
        self._is_pending = True
        self._last_has_stepped |= optimizer == self._last_of_cycle
        self._lifetimes_at_step[optimizer] = lifetimes
        self._latest_optimizer = optimizer
        self._rounds += self._saved_since
        self._saved_since = False
        return found

    def _outlives(self, optimizer: int) -> bool:
        since = self._lifetimes_at_step.get(optimizer)
        return since is not None and any(lifetime >= since for lifetime in self._alive_now())

    def is_due(self) -> bool:
        """True if the step is over now, because an optimizer stepped."""
        if not self._is_pending or in_backward():
            return False
        if self._last_has_stepped or self._rounds >= _MOST_ROUNDS:
            return True
        return not self._waits_for_graphs or not self._alive_now()

    @property
    def is_within_step(self) -> bool:
        """True if this save certainly belongs to the running step, as most saves do while graphs are alive."""
        return self._saved_since and not self._is_pending

    def is_due_before_save(self, *, graphs_are_gone: bool) -> bool:
        """True if the step is over before this save, so that the save belongs to the next step."""
        if in_backward():
            return False
        if self.is_due():
            return True
        self._saved_since = True
        return self._is_without_optimizer(graphs_are_gone)

    def is_micro_batch_over(self, *, graphs_are_gone: bool) -> bool:
        """True if this save continues the step, and all its earlier saves are freed."""
        return graphs_are_gone and not self._is_pending and not in_backward()

    def is_due_at_exit(self, *, graphs_are_gone: bool) -> bool:
        """True if the step is over when its session is left. Otherwise it may go on in the next session."""
        return self.is_due() or self._is_without_optimizer(graphs_are_gone)

    def _is_without_optimizer(self, graphs_are_gone: bool) -> bool:
        return graphs_are_gone and self._first_optimizer is None
