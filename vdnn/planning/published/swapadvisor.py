"""swapadvisor: a genetic search over what may leave, with Belady's rule inside (Huang et al., ASPLOS 2020).

An individual says of each gap whether the storage may be away in it. Of those that may, the one that is used last of
all leaves where room is needed, and comes back as early as there is room; the step is simulated with both copy engines,
and the shortest is the fittest. The first individual may use every gap: no plan of the search is slower than Belady's.

The paper's search is over something else: the order of operations, and which memory of which size class each tensor
gets. Here the order is the program's, and memory comes from torch's allocator, so that neither is ours to choose; what
is left for genes is the choice itself. Its second pass, for what stays from one step to the next, concerns parameters.
How individuals are drawn, crossed and changed is ours: the paper's numbers were not at hand.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from vdnn.planning.gaps import Gap, gaps_of, planned_lifetimes
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.under_budget import budget_to_meet, keep_everything
from vdnn.planning.published.belady import belady
from vdnn.planning.published.step_time import StepTime
from vdnn.step.plan import Absence, Plan, make_plan
from vdnn.step.recording import Recording

# Evaluations of a step of one point.
_EFFORT = 300_000
_LEAST_EVALUATIONS, _MOST_EVALUATIONS = 30, 300
_POPULATION = 16
_TOURNAMENT = 3


class SwapAdvisor(PlanPolicy):
    """`evaluations` is how many individuals are simulated: without a number fewer in longer steps. Of no budget:
    nothing leaves."""

    def __init__(self, *, evaluations: int | None = None, seed: int = 0) -> None:
        self._evaluations = evaluations
        self._seed = seed

    @property
    def name(self) -> str:
        return "swapadvisor"

    @property
    def source(self) -> str:
        return "SwapAdvisor (Huang et al., ASPLOS 2020), its swap planner"

    def plan(self, request: PlanRequest) -> Plan:
        budget_bytes = budget_to_meet(request)
        if budget_bytes is None:
            return keep_everything(request, self.name)
        recording = request.recording
        gaps = gaps_of(recording)
        step_time = StepTime(recording, gaps, request.costs)
        evaluations = self._evaluations
        if evaluations is None:
            evaluations = min(max(_EFFORT // len(recording.points), _LEAST_EVALUATIONS), _MOST_EVALUATIONS)
        evolution = _Evolution(recording, gaps, step_time, budget_bytes, evaluations, random.Random(self._seed))
        return make_plan(recording, self.name, planned_lifetimes(recording, evolution.run()), budget_bytes)


@dataclass(frozen=True, slots=True)
class _Individual:
    """`genes` has a byte for each gap."""

    genes: bytes
    step_ns: int
    absences: dict[Gap, Absence]


@dataclass(slots=True)
class _Evolution:
    recording: Recording
    gaps: Sequence[Gap]
    step_time: StepTime
    budget_bytes: int
    evaluations: int
    draw: random.Random
    _evaluated: int = 0
    _seen: set[bytes] = field(default_factory=set)

    def run(self) -> dict[Gap, Absence]:
        """Of the fittest. The budget is one that can be met."""
        everything = self._evaluate(bytes([1]) * len(self.gaps))
        assert everything is not None, "the budget can be met"
        population = [everything]
        while self._evaluated < self.evaluations and population[0].step_ns > self.recording.compute_ns:
            if self._evaluated < _POPULATION:
                genes = self._any_genes()
            else:
                genes = crossed(self._chosen(population).genes, self._chosen(population).genes, self.draw)
                genes = changed(genes, self.draw)
            population += self._born(genes)
            population.sort(key=lambda one: one.step_ns)
            del population[_POPULATION:]
        return population[0].absences

    def _born(self, genes: bytes) -> list[_Individual]:
        found = self._evaluate(genes)
        return [] if found is None else [found]

    def _evaluate(self, genes: bytes) -> _Individual | None:
        """None if it does not fit, or has been there before. Both count: a search has to end."""
        self._evaluated += 1
        if genes in self._seen:
            return None
        self._seen.add(genes)
        absences = belady(self.recording, self.gaps, [bool(gene) for gene in genes], self.budget_bytes)
        if absences is None:
            return None
        return _Individual(genes, self.step_time.outcome(absences).step_ns, absences)

    def _any_genes(self) -> bytes:
        """From few gaps left out to half of them."""
        left_out = self.draw.uniform(0, 0.5)
        return bytes(self.draw.random() >= left_out for _ in self.gaps)

    def _chosen(self, population: Sequence[_Individual]) -> _Individual:
        rivals = (self.draw.choice(population) for _ in range(_TOURNAMENT))
        return min(rivals, key=lambda one: one.step_ns)


def crossed(mother: bytes, father: bytes, draw: random.Random) -> bytes:
    """At one place: gaps lie in the order of their copies, so neighbours of a step stay together."""
    place = draw.randint(0, len(mother))
    return mother[:place] + father[place:]


def changed(genes: bytes, draw: random.Random) -> bytes:
    """About one gene in each child."""
    return bytes(gene ^ (draw.random() < 1 / len(genes)) for gene in genes)
