"""Every legal order in which the streams of a small program can run, one after the other.

The program is run from the beginning for each: first it issues all it has to, and nothing runs; then the operations
run one by one, each time another stream's next. What a program computes must not depend on the order. Programs that
wait on the host in between explore what comes after the last wait.

    for result, order in explore(lambda accelerator: program()):
        assert torch.equal(result, expected), order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from vdnn import _C
from vdnn.errors import VdnnError
from vdnn.testing.deferred.deferred_accelerator import DeferredAccelerator, Mode

_Result = TypeVar("_Result")

# A dozen operations on three streams have up to 34,650 orders.
MOST_ORDERS = 50_000


def explore(
    program: Callable[[DeferredAccelerator], Callable[[], _Result]], *, streams: int = 4, checked: bool = True
) -> Iterator[tuple[_Result, list[str]]]:
    """Runs `program`, which issues its operations and returns what reads its result, in every order: yields the
    result and the order, as the names of streams. Raises when there are too many."""
    script: list[int] = []
    for _ in range(MOST_ORDERS):
        with DeferredAccelerator(Mode.COMPUTE_LATE, streams=streams, checked=checked) as accelerator:
            read = program(accelerator)
            taken, widths = _run(accelerator, script)
            yield read(), [accelerator.device.stream_name(stream) for stream in taken]
            del read
        script = _following(script, widths)
        if not script:
            return
    raise VdnnError(f"explore: more than {MOST_ORDERS} orders: make the program smaller.")


def _choice(script: list[int], place: int) -> int:
    """At a place; the first where nothing is said."""
    return script[place] if place < len(script) else 0


def _following(script: list[int], widths: list[int]) -> list[int]:
    """The next script in order: the last choice that has another one is changed. Empty when all have been made."""
    for place in reversed(range(len(widths))):
        if _choice(script, place) + 1 < widths[place]:
            return [_choice(script, before) for before in range(place)] + [_choice(script, place) + 1]
    return []


def _run(accelerator: DeferredAccelerator, script: list[int]) -> tuple[list[_C.Stream], list[int]]:
    """The streams in the order in which they ran, and how many could have run at each place."""
    taken: list[_C.Stream] = []
    widths: list[int] = []
    while runnable := accelerator.simulated.runnable():
        stream = runnable[_choice(script, len(taken))]
        widths.append(len(runnable))
        taken.append(stream)
        accelerator.simulated.run_one(stream)
    return taken, widths
