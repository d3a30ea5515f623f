"""Which storages to rebuild instead of moving them, so that the step under a budget is shortest.

What costs least for its bytes comes first. So many of these are tried together, from none to all; from the best of
those trials single ones are let in, those whose copies the step stands still for, and taken out, the dearest first, as
long as that helps. A trial is the step with its rebuilds and a short search for the moves that it needs besides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from vdnn.planning.gaps import gaps_of
from vdnn.planning.policies.auto_offload import first_choices
from vdnn.planning.policies.plan_policy import PlanRequest
from vdnn.planning.policies.published_choices import published_choices
from vdnn.planning.rebuilding import candidates_of, cost_ns, with_rebuilds
from vdnn.planning.search import Search
from vdnn.planning.step_model import make_step_model

# Trials of a step of one point; longer steps get fewer.
_EFFORT = 120_000
_MOST_TRIALS, _LEAST_TRIALS = 160, 14
_MOVES = 40  # evaluations of moves in a trial
_MOST_POINTS_OF_PUBLISHED = 2000  # longer steps are not given to policies that take longer than the search
_SHARES = 8  # of the candidates, taken together
_MOST_PLACES = 500  # points of all the steps that choices of rebuilds make: so few are not worth a choice
_SINGLES = 6  # let in or taken out in one round


@dataclass(frozen=True, slots=True)
class RebuildTrial:
    """`waited_for`: the lifetimes whose copies the step stood still for, the longest first."""

    step_ns: int
    chosen: frozenset[int]
    waited_for: tuple[int, ...] = ()


class RebuildChoice:
    """For one request. `effort` scales how long it looks."""

    def __init__(self, request: PlanRequest, effort: float) -> None:
        assert request.budget_bytes is not None, "without a budget nothing has to go"
        self._request = request
        self._budget_bytes = request.budget_bytes
        trials = round(effort * _EFFORT / len(request.recording.points))
        self._left = max(_LEAST_TRIALS, min(_MOST_TRIALS, trials))
        self._tried: dict[frozenset[int], RebuildTrial | None] = {}

    def best(self, most: int) -> list[RebuildTrial]:
        """The shortest steps that were found and fit, at most so many; of very short steps all there are."""
        candidates = candidates_of(self._request.recording)
        if len(self._request.recording.points) << len(candidates) <= _MOST_PLACES:
            choices = (itertools.combinations(candidates, count) for count in range(len(candidates) + 1))
            return [RebuildTrial(0, frozenset(one)) for one in itertools.chain.from_iterable(choices)]
        lifetimes = self._request.recording.lifetimes
        # What leaves a part of itself is cheap for its bytes, and may be in the way of what leaves nothing.
        whole = [one for one in candidates if (rebuild := lifetimes[one].rebuild) and not rebuild.kept_bytes]
        for share in range(_SHARES, -1, -1):
            for order in (candidates, whole):
                self._try(frozenset(order[: -(-len(order) * share // _SHARES)]))
        best = self._shortest()
        while best is not None and self._left > 0:
            for chosen in self._neighbours(best, set(candidates)):
                self._try(chosen)
            before, best = best, self._shortest()
            if best == before:
                break
        found = [trial for trial in self._tried.values() if trial is not None]
        found.sort(key=lambda trial: (trial.step_ns, len(trial.chosen), sorted(trial.chosen)))
        return found[:most] + self._published(found[0].step_ns if found else None)

    def _published(self, best_ns: int | None) -> list[RebuildTrial]:
        """What the policies of others would rebuild, as far as that is shorter than all that was tried."""
        if len(self._request.recording.points) > _MOST_POINTS_OF_PUBLISHED:
            return []
        candidates = frozenset(candidates_of(self._request.recording))
        choices = {one & candidates: None for one in published_choices(self._request)}
        new = [one for one in choices if one and one not in self._tried]
        trials = [trial for one in new if (trial := self._trial(one)) is not None]
        return [trial for trial in trials if best_ns is None or trial.step_ns < best_ns]

    def _shortest(self) -> RebuildTrial | None:
        found = [trial for trial in self._tried.values() if trial is not None]
        return min(found, key=lambda trial: trial.step_ns, default=None)

    def _neighbours(self, best: RebuildTrial, candidates: set[int]) -> Iterator[frozenset[int]]:
        for index in [one for one in best.waited_for if one in candidates - best.chosen][:_SINGLES]:
            yield best.chosen | {index}
        lifetimes = self._request.recording.lifetimes
        costs = {index: cost_ns(rebuild) for index in best.chosen if (rebuild := lifetimes[index].rebuild)}
        for index in sorted(costs, key=lambda one: (-costs[one], one))[:_SINGLES]:
            yield best.chosen - {index}

    def _try(self, chosen: frozenset[int]) -> None:
        if chosen not in self._tried and self._left > 0:
            self._left -= 1
            self._tried[chosen] = self._trial(chosen)

    def _trial(self, chosen: frozenset[int]) -> RebuildTrial | None:
        recording = with_rebuilds(self._request.recording, chosen)
        if recording.peak_bytes <= self._budget_bytes:
            return RebuildTrial(recording.compute_ns, chosen)
        gaps = gaps_of(recording)
        if not gaps:
            return None
        model = make_step_model(recording, gaps, self._request.costs)
        search = Search(model, gaps, self._budget_bytes, recording.compute_ns, _MOVES)
        found = search.run(list(first_choices(self._request._replace(recording=recording), gaps)))
        if found is None:
            return None
        stalls = sorted(found.outcome.stalls, key=lambda stall: -stall[2])
        waited_for = [gaps[gap].lifetime for stall in stalls for gap in (stall[0], *stall[3]) if gap >= 0]
        return RebuildTrial(found.step_ns, chosen, tuple(dict.fromkeys(waited_for)))
