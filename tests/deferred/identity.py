"""Runs calls of torch's databases on the accelerator. A call gets the CPU's tensors, and moves them there and back.

So the tests compare leaves and outcomes on the CPU, and everything in between runs on the accelerator. Moves keep the
geometry, including offsets and overlaps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_map

import vdnn
from deferred import DeferredAccelerator, Mode
from tests.runtime.identity.outcome import Outcome, differences
from tests.runtime.rigs.side_by_side import alive
from vdnn.runtime.storage.counters import Counters

Call = Callable[..., Any]


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.to(device)
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    storage = whole.to(device).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: str) -> torch.Tensor:
        ctx.was_on = tensor.device.type
        return moved(tensor, device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return moved(gradient, ctx.was_on), None


def all_moved(values: Any, device: str) -> Any:
    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type == device:
            return value
        return _Moved.apply(value, device) if value.requires_grad else moved(value, device)

    return tree_map(move, values)


class IdentityOnIt:
    """One accelerator and a session on it. Collects failures by name."""

    def __init__(self, mode: Mode, seed: int, capacity: str = "64MiB") -> None:
        self.name = f"{mode.name}, seed {seed}"
        self.accelerator = DeferredAccelerator(mode, seed=seed, capacity=capacity)
        self.compared = 0
        self.failures: list[str] = []
        self.synchronous: dict[str, int] = {}
        self.counters = Counters()
        self._held: list[torch.Tensor] = []

    def __enter__(self) -> IdentityOnIt:
        self.accelerator.__enter__()
        self._session = vdnn.offload(
            "vdnn-all", device=self.accelerator, min_bytes=0, limits=vdnn.Limits(offload_window=1, reload_window=4096)
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.clear()
        self.counters = self._session.counters
        self.synchronous = self.accelerator.synchronous_operations
        if kind is None and alive(self._session):
            self.failures.append(f"{self.name}: still alive: {alive(self._session)}")
        self._session.close()
        self.accelerator.__exit__(kind, error, trace)

    def on_it(self, call: Call) -> Call:
        """The same call on the accelerator. Two saves follow, so that the copies of the call's saves are issued and
        released."""

        def there(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = all_moved((args, kwargs), "deferred")
            results = all_moved(call(*args, **kwargs), "cpu")
            one = torch.ones(1, device="deferred", requires_grad=True)
            self._held += [one * torch.ones(1, device="deferred") for _ in range(2)]
            return results

        return there

    def compare(self, name: str, run: Callable[[Callable[[Call], Call]], Outcome]) -> None:
        """Compares `run` with plain calls, with calls on the accelerator, and with those calls in the session."""
        cpu = run(lambda call: call)
        if cpu.error is not None:
            return  # the database is at fault: some of its modules take numbers of another type
        plain = self._on_the_cpu(run(self.on_it))
        self._fail(name, "not as on the CPU", differences(cpu, plain))
        with self._session:
            ours = self._on_the_cpu(run(self.on_it))
        self._fail(name, "not as without a session", differences(plain, ours))
        self.accelerator.synchronize()
        self._fail(name, "order", [repr(violation) for violation in self.accelerator.violations])
        self.accelerator.violations.clear()
        self.compared += 1

    def _on_the_cpu(self, outcome: Outcome) -> Outcome:
        self._held.clear()
        for name, found in outcome.tensors.items():
            if found is not None:
                outcome.tensors[name] = dataclasses.replace(found, content=found.content.cpu())
        return outcome

    def _fail(self, name: str, what: str, lines: list[str]) -> None:
        self.failures += [f"{name} ({self.name}): {what}: {line[:300]}" for line in lines]


@contextmanager
def noticing_seeds() -> Iterator[list[int]]:
    """Collects the seeds that a call sets. The database sets a seed around operations that draw numbers, and restores
    the old state when the call returns; the accelerator may not have drawn by then."""
    seeds: list[int] = []
    set_seed = torch.manual_seed

    def noticed(seed: int) -> Any:
        seeds.append(seed)
        return set_seed(seed)

    with mock.patch.object(torch, "manual_seed", noticed):
        yield seeds
