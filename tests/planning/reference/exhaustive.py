"""All plans of a small recording, and the shortest step under each budget. Tests compare the searches with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from vdnn.planning.costs import LinkCosts
from vdnn.planning.gaps import Gap, gaps_of
from vdnn.planning.search.step_model import AbsenceTuple, make_step_model
from vdnn.step.recording import Recording


def ways_of(place: int, gap: Gap) -> Iterator[AbsenceTuple | None]:
    """The ways to plan a lifetime: kept, or released at any point and reloaded at any later one."""
    yield None
    for release in range(gap.release_point, gap.last):
        yield place, release, -1
        if gap.use is not None:
            for reload in range(max(release + 1, gap.first), gap.use):
                yield place, release, reload


def count_of_plans(recording: Recording) -> int:
    product = 1
    for place, gap in enumerate(gaps_of(recording)):
        product *= len(list(ways_of(place, gap)))
    return product


def shortest_steps(recording: Recording, costs: LinkCosts, budgets: Sequence[int]) -> list[int | None]:
    """The shortest step for each budget, or None if no plan fits."""
    gaps = gaps_of(recording)
    model = make_step_model(recording, gaps, costs)
    best: list[int | None] = [None] * len(budgets)
    for ways in itertools.product(*(list(ways_of(place, gap)) for place, gap in enumerate(gaps))):
        absences = [one for one in ways if one is not None]
        peak = model.peak_bytes(absences)
        fitting = [place for place, budget in enumerate(budgets) if peak <= budget]
        if not fitting:
            continue
        step_ns = model.replay(absences).step_ns
        for place in fitting:
            found = best[place]
            best[place] = step_ns if found is None else min(found, step_ns)
    return best
