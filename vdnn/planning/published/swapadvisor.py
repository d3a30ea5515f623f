"""swapadvisor: a genetic search over the gaps that may be used, with Belady's rule inside (Huang et al., ASPLOS 2020).

The genes of an individual say for each gap whether the storage may be absent in it. Belady's rule then chooses which of
these are offloaded when room is needed, and reloads them as early as there is room. The step is simulated with both
copy engines, and the shortest step is the fittest. The first individual may use every gap, so the plan is never slower
than Belady's.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from vdnn import _C
from vdnn.planning.gaps import Gap, gaps_of, planned_lifetimes
from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.policies.swap_schedule import reload_within_room
from vdnn.planning.policies.under_budget import budget_to_meet, keep_everything
from vdnn.planning.search.step_model import make_step_model, tuples_by_gap
from vdnn.step.plan import Absence, Plan, make_plan
from vdnn.step.recording import Recording

# Evaluations for a step of one point; longer steps get fewer.
_EFFORT = 300_000
_LEAST_EVALUATIONS, _MOST_EVALUATIONS = 30, 300
_POPULATION = 16
_TOURNAMENT = 3


class SwapAdvisor(PlanPolicy):
    """Without a budget nothing is offloaded. `evaluations`: how many individuals are simulated; by default fewer in
    longer steps.

    Differences from the paper: its genes are the order of operations, and the memory of a size class that each tensor
    gets. Here the program has the order and torch's allocator the memory, so the genes are the choice of gaps. The
    paper's second pass, for what stays from one step to the next, concerns parameters and is left out. How individuals
    are drawn, crossed and changed is ours, because the paper's numbers were not at hand.
    """

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
        model = make_step_model(recording, gaps, request.costs)
        evaluations = self._evaluations
        if evaluations is None:
            evaluations = min(max(_EFFORT // len(recording.points), _LEAST_EVALUATIONS), _MOST_EVALUATIONS)
        evolution = _Evolution(recording, gaps, model, budget_bytes, evaluations, random.Random(self._seed))
        return make_plan(recording, self.name, planned_lifetimes(recording, evolution.run()), budget_bytes)


@dataclass(frozen=True, slots=True)
class _Individual:
    """`genes` has one byte for each gap: 1 if the gap may be used."""

    genes: bytes
    step_ns: int
    absences: dict[Gap, Absence]


@dataclass(slots=True)
class _Evolution:
    """One genetic search. `budget_bytes` has to be a budget that some plan meets."""

    recording: Recording
    gaps: Sequence[Gap]
    model: _C.StepModel
    budget_bytes: int
    evaluations: int
    draw: random.Random
    _evaluated: int = 0
    _seen: set[bytes] = field(default_factory=set)

    def run(self) -> dict[Gap, Absence]:
        """The absences of the fittest individual."""
        everything = self._evaluate(bytes([1]) * len(self.gaps))
        if everything is None:
            raise RuntimeError(
                f"swapadvisor: expected a plan under {self.budget_bytes} bytes with all gaps, found none"
            )
        population = [everything]
        while self._evaluated < self.evaluations and population[0].step_ns > self.recording.kept_ns:
            if self._evaluated < _POPULATION:
                genes = self._random_genes()
            else:
                genes = crossed(self._chosen(population).genes, self._chosen(population).genes, self.draw)
                genes = changed(genes, self.draw)
            child = self._evaluate(genes)
            population += [] if child is None else [child]
            population.sort(key=lambda one: one.step_ns)
            del population[_POPULATION:]
        return population[0].absences

    def _evaluate(self, genes: bytes) -> _Individual | None:
        """None if the individual does not fit, or was evaluated before. Both count, so that the search ends."""
        self._evaluated += 1
        if genes in self._seen:
            return None
        self._seen.add(genes)
        absences = belady(self.recording, self.gaps, [bool(gene) for gene in genes], self.budget_bytes)
        if absences is None:
            return None
        step_ns = self.model.replay(tuples_by_gap(self.gaps, absences)).step_ns
        return _Individual(genes, step_ns, absences)

    def _random_genes(self) -> bytes:
        """Genes that leave out a random share of the gaps, up to half of them."""
        left_out = self.draw.uniform(0, 0.5)
        return bytes(self.draw.random() >= left_out for _ in self.gaps)

    def _chosen(self, population: Sequence[_Individual]) -> _Individual:
        rivals = (self.draw.choice(population) for _ in range(_TOURNAMENT))
        return min(rivals, key=lambda one: one.step_ns)


def crossed(mother: bytes, father: bytes, draw: random.Random) -> bytes:
    """One-point crossover: gaps are in the order of their copies, so gaps that are close in the step stay together."""
    split = draw.randint(0, len(mother))
    return mother[:split] + father[split:]


def changed(genes: bytes, draw: random.Random) -> bytes:
    """Flips about one gene of each child."""
    return bytes(gene ^ (draw.random() < 1 / len(genes)) for gene in genes)


# Belady's rule for a recorded step: when room is needed, the storage whose next use is furthest away is offloaded.
#
# The rule is optimal if every reload costs the same and none is hidden. SwapAdvisor uses it inside its search. Storages
# are reloaded as early as there is room, the next used first.


def belady(
    recording: Recording, gaps: Sequence[Gap], may_leave: Sequence[bool], budget_bytes: int
) -> dict[Gap, Absence] | None:
    """The absences that the rule chooses among the gaps that `may_leave` allows. None if they do not fit the budget."""
    released = _evicted(recording, gaps, may_leave, budget_bytes)
    return None if released is None else reload_within_room(recording, released, {}, budget_bytes)


def _evicted(
    recording: Recording, gaps: Sequence[Gap], may_leave: Sequence[bool], budget_bytes: int
) -> dict[Gap, int] | None:
    beginning: defaultdict[int, list[Gap]] = defaultdict(list)
    for gap, may in zip(gaps, may_leave, strict=True):
        if may:
            beginning[gap.first].append(gap)
    never = len(recording.points)
    on_device: list[tuple[int, int, int, Gap]] = []  # a heap: the furthest use first; for equal uses the largest
    released: dict[Gap, int] = {}
    reloaded_at: defaultdict[int, int] = defaultdict(int)
    absent = 0
    for interval, point in enumerate(recording.points):
        absent -= reloaded_at[interval]
        for gap in beginning[interval]:
            furthest = never if gap.use is None else gap.use
            heapq.heappush(on_device, (-furthest, -gap.nbytes, gap.lifetime, gap))
        while point.peak_bytes - absent > budget_bytes:
            while on_device and on_device[0][3].last < interval:
                heapq.heappop(on_device)
            if not on_device:
                return None
            gap = heapq.heappop(on_device)[3]
            released[gap] = interval - 1
            absent += gap.nbytes
            reloaded_at[gap.last + 1] += gap.nbytes
    return released
