"""DeferredAccelerator: while it is entered, torch.device("deferred") runs operations later than they are called.

The program's thread gets its tensors at once. The operations run in stream order on other threads, over memory that is
reused as soon as the rules allow. A program that reads before a copy is complete, or frees memory that a copy still
reads, gets wrong numbers, and the checker names both accesses.

    with DeferredAccelerator(Mode.RANDOM, seed=3) as accelerator:
        model.to("deferred")
        with vdnn.offload("vdnn-all", device=accelerator):
            model(x.to("deferred")).sum().backward()
    assert not accelerator.violations
"""

from __future__ import annotations

import gc
from enum import Enum
from typing import Any

import torch

from deferred.extension import TORCH_TYPE, load_extension
from deferred.origins import program_origin
from vdnn import _C
from vdnn.bytesize import parse_bytes
from vdnn.runtime.machine.tensor_device import TensorDevice


class Mode(Enum):
    """The time at which a stream runs its operations. Stream 0 computes, all others copy."""

    EARLY = "all streams run at once"
    COPIES_LATE = "compute runs at once, copies run when the program waits for them"
    COPIES_EARLY = "copies run at once, compute runs when the program waits for it"
    COMPUTE_LATE = "all streams run only when the program waits for them"
    RANDOM = "each stream runs a few operations at every call, drawn from the seed"


class DeferredAccelerator(TensorDevice):
    """A process can have one at a time. Tensors made in it cannot be used after it.

    With `stacks`, a violation says where in the program each access was issued: `first_issued_at`, `second_issued_at`.
    Every operation then looks up its stack, which takes it twice as long.
    """

    torch_type = TORCH_TYPE

    def __init__(
        self,
        mode: Mode = Mode.COMPUTE_LATE,
        *,
        seed: int = 0,
        capacity: int | str = "256MiB",
        streams: int = 4,
        checked: bool = True,
        stacks: bool = False,
    ) -> None:
        if streams < 1:
            raise ValueError(f"streams: expected 1 or more, got {streams}.")
        self._extension = load_extension()
        copies_late = mode in (Mode.COPIES_LATE, Mode.COMPUTE_LATE)
        schedule = _C.Schedule.LAZY if copies_late else _C.Schedule.EAGER
        if mode is Mode.RANDOM:
            schedule = _C.Schedule.RANDOM
        self.mode = mode
        self._capacity_bytes = parse_bytes(capacity)
        self.simulated = _C.SimDevice(schedule=schedule, seed=seed, name=f"deferred accelerator ({mode.name})")
        self._checker = _C.OrderingChecker(self.simulated, on_violation=_C.OnViolation.COLLECT) if checked else None
        self.device = self.simulated if self._checker is None else self._checker
        self._stacks = stacks and checked
        self._streams = [self.device.create_stream(_name(number)) for number in range(streams)]
        if mode is not Mode.RANDOM:
            self.simulated.set_eager(self._streams[0], mode in (Mode.EARLY, Mode.COPIES_LATE))
        self._table = _C.sim_table(self.device)
        self._violations: list[_C.OrderingViolation] = []
        self._is_running = False

    def __enter__(self) -> DeferredAccelerator:
        origin = program_origin if self._stacks else None
        self._extension.start(self._table, [stream.index for stream in self._streams], self._capacity_bytes, origin)
        self._is_running = True
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if self.memory.allocated_bytes:
            gc.collect()  # free graphs in reference cycles while the accelerator can still take their memory
        try:
            if kind is None:
                self.synchronize()
        finally:
            self._is_running = False
            self._extension.stop()
            if kind is None:
                self._violations += self._take_violations()
            self.device.close()

    def current_stream(self) -> _C.Stream:
        if self._stacks and self._checker is not None:
            self._checker.set_origin(program_origin())  # for what a hook of the runtime issues next
        number: int = self._extension.current_stream()
        return self._streams[number]

    def synchronize(self) -> None:
        """Blocks until all streams are done. Raises if an operation failed."""
        self._extension.drain_all()

    # Results.

    @property
    def violations(self) -> list[_C.OrderingViolation]:
        """Accesses to the same bytes that no record and wait order, since the accelerator was made."""
        if self._is_running:
            self._violations += self._take_violations()
        return self._violations

    def _take_violations(self) -> list[_C.OrderingViolation]:
        return [] if self._checker is None else self._checker.take_violations()

    @property
    def checked_accesses(self) -> int:
        return 0 if self._checker is None else self._checker.checked_accesses

    @property
    def memory(self) -> Any:
        """Bytes allocated now and at most, and how often memory was reused."""
        return self._extension.memory_stats()

    def reset_peak(self) -> None:
        self._extension.reset_peak()

    @property
    def deferred_operations(self) -> int:
        operations: int = self._extension.deferred()
        return operations

    @property
    def synchronous_operations(self) -> dict[str, int]:
        """The number of calls, by operation, that could not be deferred and ran at once after all streams."""
        operations: dict[str, int] = self._extension.synchronous_operations()
        return operations

    @property
    def torch_device(self) -> torch.device:
        return torch.device(TORCH_TYPE, 0)


def _name(number: int) -> str:
    return "compute" if number == 0 else f"side {number}"
