"""The readable form of csrc/planning/recompute_search.h: chooses which storages to recompute instead of moving them.

Candidates are ordered by their cost per byte, as far as the budget can be met with them. The search tries the first n
of them, from none to all, and then numbers closer and closer to the best one. From there it adds candidates whose
copies the step waits for and removes the most expensive ones: several at a time, then single ones and pairs, as long as
that helps; then the same from disturbed choices. A trial is the step with its recomputes and a short search for the
moves that it needs besides. If a choice is known that is good for nearly the same step, it is tried first. A choice
whose plans are all certain to be no shorter than the best one is not tried.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.planning.reference.local_search import Search
from tests.planning.reference.move_search import first_choices
from tests.planning.reference.recomputing import ordered_candidates
from vdnn import _C
from vdnn.planning.gaps import Gap
from vdnn.planning.policies.plan_policy import PlanRequest
from vdnn.planning.recomputing import cost_ns, host_cost_ns
from vdnn.planning.recorded_step import make_link_model, recorded_step
from vdnn.planning.search.effort import Effort

# Trials for a step of one point; longer steps get fewer.
_EFFORT = 120_000
_LEAST_TRIALS = 14
# A choice that cannot meet the budget is found at once, and counts as this part of a trial.
_INFEASIBLE_SHARE = 1 / 8
# With this share of the room between the least memory and that of everything kept, `by_room` changes nothing.
_USUAL_ROOM = 0.1
_FEWEST_BY_ROOM, _MOST_BY_ROOM = 0.6, 3  # times the usual trials
_SHARES = 8  # at first, multiples of 1/8 of the candidates are tried
_MOST_POINTS = 500  # if the steps of all choices have at most this many points, every choice is a finalist
_GROUPS = 16  # at first, 1/16 of the candidates are added or removed together
_SINGLES = 6  # added or removed singly in one round
_PAIRS = 3  # of these, exchanged with each other
_MOST_DISTURBED = 4  # candidates that a disturbance adds or removes
_MOST_STALE = 20  # the search ends after this many disturbed choices in a row that were seen before


def gaps_of_recomputed(recomputed: _C.RecomputedStep) -> tuple[Gap, ...]:
    """The gaps of a step with its recomputes."""
    return tuple(map(Gap._make, recomputed.gaps))


@dataclass(frozen=True, slots=True)
class RecomputeTrial:
    """A choice and its step. `waited_for`: the lifetimes whose copies the step waits for, the longest stall first."""

    step_ns: int
    chosen: frozenset[int]
    waited_for: tuple[int, ...] = ()
    is_bound_by_host: bool = False


class RecomputeChoice:
    """The search for one request, which has to have a budget."""

    def __init__(self, request: PlanRequest, effort: Effort, known: Sequence[int] = ()) -> None:
        if request.budget_bytes is None:
            raise RuntimeError("RecomputeChoice: expected a request with a budget, got none")
        self._request = request
        self._known = frozenset(known)
        self._budget_bytes = request.budget_bytes
        self._step = recorded_step(request.recording)
        self._link = make_link_model(request.costs)
        trials = round(effort.trials * _EFFORT / len(request.recording.points))
        self._moves = effort.moves_a_trial
        self._shortest_ns: dict[frozenset[int], float] = {}  # no plan of a choice is shorter; infinite: it does not fit
        self._tried: dict[frozenset[int], RecomputeTrial] = {}
        self._candidates = ordered_candidates(request.recording, by_issue=False)
        most_trials = effort.most_trials
        if effort.by_room:
            most_trials = round(most_trials * self._share_by_room())
        self._left: float = max(_LEAST_TRIALS, min(most_trials, trials))
        lifetimes = request.recording.lifetimes
        self._recomputes = {one: recompute for one in self._candidates if (recompute := lifetimes[one].recompute)}

    def _share_by_room(self) -> float:
        kept = self._step.with_recomputes([])
        least_bytes = min(kept.least_bytes, self._step.with_recomputes(self._candidates).least_bytes)
        room = self._budget_bytes - least_bytes
        if room <= 0:
            return _MOST_BY_ROOM
        share = _USUAL_ROOM * (kept.peak_bytes - least_bytes) / room
        return min(max(share, _FEWEST_BY_ROOM), _MOST_BY_ROOM)

    def best(self, most: int) -> list[RecomputeTrial]:
        """The shortest steps that were found and fit, at most `most`. For very short steps all choices, untried."""
        candidates = self._candidates
        if len(self._request.recording.points) << len(candidates) <= _MOST_POINTS:
            choices = (itertools.combinations(candidates, count) for count in range(len(candidates) + 1))
            return [RecomputeTrial(0, frozenset(one)) for one in itertools.chain.from_iterable(choices)]
        if self._known:
            self._try(self._known)
        # Encoded storages are cheap per byte, but the parts that they leave may take the room of recomputes.
        whole = [one for one in candidates if not self._recomputes[one].kept_bytes]
        orders = [candidates, whole]
        if self._request.recording.has_host:
            orders.append(ordered_candidates(self._request.recording, by_issue=True))
        for order in orders:
            self._try_counts(self._fitting(order))
        self._improve()
        self._disturb()
        found = sorted(self._tried.values(), key=lambda trial: (trial.step_ns, len(trial.chosen), sorted(trial.chosen)))
        return found[:most]

    def _fitting(self, order: Sequence[int]) -> list[int]:
        """Those candidates, in this order, with which and with those before them the budget can be met."""
        fitting: list[int] = []
        waiting = [order]
        while waiting:
            group = waiting.pop()
            if self._step.with_recomputes([*fitting, *group]).least_bytes <= self._budget_bytes:
                fitting += group
            elif len(group) > 1:
                half = len(group) // 2
                waiting += [group[half:], group[:half]]
        return fitting

    def _try_counts(self, order: Sequence[int]) -> None:
        """Tries the first n of the order: multiples of 1/8 of them, and then numbers ever closer to the best n."""
        steps: dict[int, float] = {}

        def attempt(count: int) -> None:
            trial = self._try(frozenset(order[:count]), min(steps.values(), default=math.inf))
            steps[count] = math.inf if trial is None else trial.step_ns

        for share in range(_SHARES, -1, -1):
            attempt(-(-len(order) * share // _SHARES))
        while self._left > 0:
            counts = sorted(steps)
            best = min(range(len(counts)), key=lambda one: steps[counts[one]])
            around = counts[max(0, best - 1) : best + 2]
            between = [(one + other) // 2 for one, other in itertools.pairwise(around) if other - one > 1]
            if not between or steps[counts[best]] == math.inf:
                break
            for count in between:
                attempt(count)

    def _improve(self) -> None:
        """Descends from the best choice, with ever smaller groups."""
        best = self._shortest()
        if best is not None:
            self._descend(best, max(1, len(self._candidates) // _GROUPS))

    def _disturb(self) -> None:
        draw = random.Random(0)
        stale = 0
        while self._left > 0 and stale < _MOST_STALE:
            best = self._shortest()
            if best is None:
                break
            before = len(self._shortest_ns)
            count = min(len(self._candidates), draw.randint(2, _MOST_DISTURBED))
            disturbed = self._try(best.chosen ^ frozenset(draw.sample(self._candidates, count)))
            if disturbed is not None:
                self._descend(disturbed, 1)
            stale = stale + 1 if len(self._shortest_ns) == before else 0

    def _descend(self, best: RecomputeTrial, width: int) -> None:
        while self._left > 0:
            better: list[RecomputeTrial] = []
            for toggled in self._neighbours(best, width):
                trial = self._try(best.chosen ^ toggled, best.step_ns)
                if trial is not None and trial.step_ns < best.step_ns:
                    better.append(trial)
            if len(better) > 1:
                together = frozenset().union(*(trial.chosen ^ best.chosen for trial in better))
                trial = self._try(best.chosen ^ together, best.step_ns)
                if trial is not None:
                    better.append(trial)
            if better:
                best = min(better, key=lambda trial: trial.step_ns)
            elif width > 1:
                width //= 2
            else:
                break

    def _neighbours(self, best: RecomputeTrial, width: int) -> Iterator[frozenset[int]]:
        """Sets of candidates to toggle."""
        to_add = [one for one in best.waited_for if one in self._recomputes and one not in best.chosen]
        cost = host_cost_ns if best.is_bound_by_host else cost_ns
        to_remove = sorted(best.chosen, key=lambda one: (-cost(self._recomputes[one]), one))
        if width > 1:
            yield frozenset(to_add[:width])
            yield frozenset(to_remove[:width])
            yield frozenset([*to_add[:width], *to_remove[:width]])
            return
        for index in (*to_add[:_SINGLES], *to_remove[:_SINGLES]):
            yield frozenset([index])
        for pair in itertools.product(to_add[:_PAIRS], to_remove[:_PAIRS]):
            yield frozenset(pair)

    def _shortest(self) -> RecomputeTrial | None:
        found = (self._tried[chosen] for chosen in self._shortest_ns if chosen in self._tried)
        return min(found, key=lambda trial: trial.step_ns, default=None)

    def _try(self, chosen: frozenset[int], below_ns: float = math.inf) -> RecomputeTrial | None:
        """None if it does not fit, or if no plan of it is shorter than `below_ns`."""
        if chosen not in self._shortest_ns and self._left > 0:
            recomputed = self._step.with_recomputes(sorted(chosen))
            fits = recomputed.least_bytes <= self._budget_bytes
            self._left -= 1 if fits else _INFEASIBLE_SHARE
            shortest_ns = recomputed.shortest_ns(self._link, self._budget_bytes) if fits else math.inf
            self._shortest_ns[chosen] = shortest_ns
        if chosen not in self._tried and self._shortest_ns.get(chosen, math.inf) < below_ns:
            trial = self._trial(chosen)
            if trial is not None:
                self._tried[chosen] = trial
        return self._tried.get(chosen)

    def _trial(self, chosen: frozenset[int]) -> RecomputeTrial | None:
        recomputed = self._step.with_recomputes(sorted(chosen))
        if recomputed.peak_bytes <= self._budget_bytes:
            return RecomputeTrial(recomputed.step_ns, chosen)
        gaps = gaps_of_recomputed(recomputed)
        model = recomputed.model(self._link, self._request.costs.issue_ns)
        search = Search(model, gaps, self._budget_bytes, recomputed.step_ns, self._moves)
        found = search.run(list(first_choices(recomputed.compute_ns, gaps, self._request.costs)))
        if found is None:
            return None
        stalls = sorted(found.outcome.stalls, key=lambda stall: -stall[2])
        waited_for = [gaps[gap].lifetime for stall in stalls for gap in (stall[0], *stall[3]) if gap >= 0]
        is_bound_by_host = found.outcome.host_ns >= found.step_ns
        return RecomputeTrial(found.step_ns, chosen, tuple(dict.fromkeys(waited_for)), is_bound_by_host)
