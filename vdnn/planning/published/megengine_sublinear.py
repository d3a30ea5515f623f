"""megengine-sublinear: cuts for the least memory, by a grid of block sizes and a genetic search (MegEngine).

The storages of the step, in the order of their saves, are cut into blocks (save_blocks.py). A storage inside a block is
recomputed, unless its next reader comes so soon that this is not worth it (worth_discarding()). The last storage of a
block and all that later blocks read are kept. The value of cuts is the peak of the step that they make; time is not
part of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields

from vdnn.planning.policies.backward_operations import operations_of
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.under_budget import budget_to_meet, keep_everything
from vdnn.planning.published.recomputed_steps import ChosenRecomputes, RecomputedSteps, plan_of_recomputes
from vdnn.planning.published.save_blocks import SaveBlocks
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording

Cuts = frozenset[int]

_SEED = 2333
_LEAST_THRESHOLD = 1 << 10
_SURVIVAL = 7 / 8
_MOST_REFINED = 100  # this many of the most expensive recomputes may be undone at the end


@dataclass(frozen=True, slots=True)
class SublinearConfig:
    """The parameters of MegEngine's sublinear memory, under its names.

    `thresh_nr_try`: block sizes that are tried in each of two rounds. `genetic_nr_iter`: generations of the genetic
    search, none by default. `genetic_pool_size`: how many survive a generation. `lb_memory_mb`: a peak in MiB below
    which memory is spent on time. `num_worker` has no effect here: one worker is enough.
    """

    thresh_nr_try: int = 10
    genetic_nr_iter: int = 0
    genetic_pool_size: int = 20
    lb_memory_mb: int = 0
    num_worker: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("genetic_pool_size", "num_worker") else 0
            if type(value) is not int or value < least:
                raise ValueError(
                    f"SublinearConfig: expected {field.name} to be an integer of at least {least}, got {value!r}."
                )


class MegengineSublinear(PlanPolicy):
    """Without a budget the plan has the least memory that the search finds, or `lb_memory_mb`.

    [Note: MegEngine's search] First, a block ends where its storages reach a threshold: the peak, half of the peak,
    half of that and so on, down to 1 KiB; then `thresh_nr_try` thresholds evenly up to the peak, and as many around the
    best. Then follow `genetic_nr_iter` generations. Each parent has two children: one changed twice (a cut more, a cut
    less, a cut elsewhere, or no change), and one crossed with a mate. From the best on, each survives with a
    probability of 7/8, more the worse it is. In the end, if the peak is below `lb_memory_mb` (here: below the budget),
    the storages that cost most to recompute are kept, each as the end of a block, as long as the peak allows.

    Differences from MegEngine: it also splits and discards in the backward pass. A plan recomputes a storage once, for
    its first use there. The policy is written from a description of the algorithm.
    """

    def __init__(self, config: SublinearConfig | None = None) -> None:
        self._config = SublinearConfig() if config is None else config

    @property
    def name(self) -> str:
        return "megengine-sublinear"

    @property
    def source(self) -> str:
        return "MegEngine, sublinear memory with its genetic search"

    def plan(self, request: PlanRequest) -> Plan:
        budget_bytes = budget_to_meet(request)
        if budget_bytes is None and request.budget_bytes is not None:
            return keep_everything(request, self.name)
        search = _SublinearSearch(request.recording, self._config)
        cuts = search.least()
        enough_bytes = self._config.lb_memory_mb << 20 if budget_bytes is None else budget_bytes
        return plan_of_recomputes(request, self.name, search.refined(cuts, enough_bytes).chosen)


class _SublinearSearch:
    """See [Note: MegEngine's search]."""

    def __init__(self, recording: Recording, config: SublinearConfig) -> None:
        self._config = config
        self._peak_bytes = recording.peak_bytes
        self._steps = RecomputedSteps(recording)
        self._blocks = SaveBlocks(self._steps, worth_discarding(self._steps))
        self._recording = recording
        self._draw = random.Random(_SEED)
        self._found: dict[Cuts, int] = {frozenset(range(len(self._blocks.order))): self._peak_bytes}
        self._best_threshold = self._peak_bytes

    def least(self) -> Cuts:
        """The cuts with the lowest peak."""
        tries = self._config.thresh_nr_try
        threshold = self._peak_bytes
        while threshold >= _LEAST_THRESHOLD:
            self._try(threshold)
            threshold //= 2
        for number in range(1, tries + 1):
            self._try(self._peak_bytes * number // tries)
        around = self._best_threshold
        for number in range(tries):
            self._try(around // 2 + (2 * around - around // 2) * number // max(tries - 1, 1))
        if self._config.genetic_nr_iter:
            self._evolve()
        return min(self._found, key=self._rank)

    def refined(self, cuts: Cuts, enough_bytes: int) -> ChosenRecomputes:
        """The step with more cuts, added as long as the peak stays within `enough_bytes`."""
        step = self._steps.step(self._blocks.inside(cuts))
        cut_after = {index: cut for cut, index in enumerate(self._blocks.order)}
        costs = {index: self._cost_ns(index) for index in step.chosen}
        for index in sorted(costs, key=lambda one: (-costs[one], one))[:_MOST_REFINED]:
            if step.peak_bytes >= enough_bytes:
                break
            more_cuts = cuts | {cut_after[index]}
            further = self._steps.step(self._blocks.inside(more_cuts))
            if further.peak_bytes <= enough_bytes:
                cuts, step = more_cuts, further
        return step

    def _try(self, threshold: int) -> None:
        cuts = self._blocks.cuts_of(max(threshold, 1))
        least = min(self._found.values())
        if cuts not in self._found and self._peak(cuts) <= least:
            self._best_threshold = threshold

    def _peak(self, cuts: Cuts) -> int:
        if cuts not in self._found:
            self._found[cuts] = self._steps.step(self._blocks.inside(cuts)).peak_bytes
        return self._found[cuts]

    def _rank(self, cuts: Cuts) -> tuple[int, list[int]]:
        return self._peak(cuts), sorted(cuts)

    def _cost_ns(self, index: int) -> int:
        recompute = self._recording.lifetimes[index].recompute
        return 0 if recompute is None else recompute.compute_ns

    # The genetic search.

    def _evolve(self) -> None:
        pool = sorted(self._found, key=self._rank)[: self._config.genetic_pool_size]
        for _ in range(self._config.genetic_nr_iter):
            children = [child for parent in pool for child in self._children(parent, pool)]
            pool = self._survivors(sorted({*pool, *children}, key=self._rank))

    def _children(self, parent: Cuts, pool: list[Cuts]) -> Iterator[Cuts]:
        yield self._changed(self._changed(parent))
        mate = self._draw.choice(pool)
        split = self._draw.randint(0, len(self._blocks.order))
        yield frozenset({*(cut for cut in parent if cut < split), *(cut for cut in mate if cut >= split)})

    def _changed(self, cuts: Cuts) -> Cuts:
        anywhere = self._draw.randrange(len(self._blocks.order))
        change = self._draw.randrange(4)
        if change == 0 or (change in (1, 2) and not cuts):
            return cuts | {anywhere}
        if change == 3:
            return cuts
        fewer = cuts - {self._draw.choice(sorted(cuts))}
        return fewer if change == 1 else fewer | {anywhere}

    def _survivors(self, ranked: list[Cuts]) -> list[Cuts]:
        best = max(self._peak(ranked[0]), 1)
        kept: list[Cuts] = []
        for cuts in ranked:
            if len(kept) == self._config.genetic_pool_size:
                break
            if self._draw.random() < min(1.0, _SURVIVAL * self._peak(cuts) / best):
                kept.append(cuts)
        return kept or ranked[:1]


def worth_discarding(steps: RecomputedSteps) -> list[int]:
    """Storages whose first use is more points after their last save than the reader has inputs."""
    inputs = {use: len(operation.uses) for operation in operations_of(steps.recording) for use in operation.uses}
    worth = []
    for index in steps.candidates:
        lifetime = steps.recording.lifetimes[index]
        uses = [use for use in lifetime.uses if use > lifetime.saves[-1]]
        if not uses or uses[0] - lifetime.saves[-1] > inputs[uses[0]]:
            worth.append(index)
    return worth
