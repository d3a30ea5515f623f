"""Runs a small program in every legal order of its streams' operations.

The program starts again for each order. First it issues all its operations, and none runs. Then they run one by one,
each the next of a chosen stream. The result of a correct program does not depend on the order. If a program
synchronizes on the host, only the orders after its last synchronization are explored.

    for result, order in explore(lambda accelerator: program()):
        assert torch.equal(result, expected), order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from deferred.deferred_accelerator import DeferredAccelerator, Mode
from vdnn import _C
from vdnn.errors import VdnnError

_Result = TypeVar("_Result")

# A dozen operations on three streams have up to 34,650 orders.
MOST_ORDERS = 50_000


def explore(
    program: Callable[[DeferredAccelerator], Callable[[], _Result]], *, streams: int = 4, checked: bool = True
) -> Iterator[tuple[_Result, list[str]]]:
    """Runs `program` in every order, and yields its result and the order, as names of streams.

    `program` issues its operations and returns a function that reads the result. Raises VdnnError above MOST_ORDERS.
    """
    script: list[int] = []
    for _ in range(MOST_ORDERS):
        with DeferredAccelerator(Mode.COMPUTE_LATE, streams=streams, checked=checked) as accelerator:
            read = program(accelerator)
            order, widths = _run(accelerator, script)
            yield read(), [accelerator.device.stream_name(stream) for stream in order]
            del read
        script = _next_script(script, widths)
        if not script:
            return
    raise VdnnError(f"explore: the program has more than {MOST_ORDERS} orders. Make it smaller.")


def _choice(script: list[int], index: int) -> int:
    """The choice at `index`: which of the runnable streams runs. Past the script's end, the first one."""
    return script[index] if index < len(script) else 0


def _next_script(script: list[int], widths: list[int]) -> list[int]:
    """The next script in lexicographic order: increments the last choice that can be. Empty after the last script."""
    for index in reversed(range(len(widths))):
        if _choice(script, index) + 1 < widths[index]:
            return [_choice(script, earlier) for earlier in range(index)] + [_choice(script, index) + 1]
    return []


def _run(accelerator: DeferredAccelerator, script: list[int]) -> tuple[list[_C.Stream], list[int]]:
    """Follows the script. Returns the stream of each operation run, and how many streams were runnable before each."""
    order: list[_C.Stream] = []
    widths: list[int] = []
    while runnable := accelerator.simulated.runnable():
        stream = runnable[_choice(script, len(order))]
        widths.append(len(runnable))
        order.append(stream)
        accelerator.simulated.run_one(stream)
    return order, widths
