"""How long the search of `auto` takes: in full, as for `vdnn plan`; quickly, while a training waits for its plan; more
quickly, where the plan of nearly the same step is known; or deeply, beside a training.

Which storages are recomputed decides more than the last moves: a quick search tries nearly as many choices of them as a
full one, each with fewer moves, and then searches little for the moves of fewer finalists.
"""

from __future__ import annotations

from typing import NamedTuple


class Effort(NamedTuple):
    """`moves` scales the evaluations of moves, `trials` the choices of recomputes that are tried, at most
    `most_trials`. Each of these is a search of `moves_a_trial` evaluations. The best `finalists` get a whole search.
    `by_room`: `most_trials` is up to three times as large near the least memory, where few choices are good, and down
    to 0.6 times where the budget leaves room, where most are."""

    moves: float = 1.0
    trials: float = 1.0
    most_trials: int = 400
    moves_a_trial: int = 40
    finalists: int = 3
    by_room: bool = False


FULL = Effort()
DEEP = Effort(trials=8.0, most_trials=1600, moves_a_trial=80, finalists=6)
QUICK = Effort(moves=0.003, most_trials=100, moves_a_trial=12, finalists=2, by_room=True)
NEARBY = Effort(moves=0.002, most_trials=40, moves_a_trial=8, finalists=2, by_room=True)
