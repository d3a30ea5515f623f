"""Measures one cell in this process: a workload's step under a peer, at a place.

After the settling steps of the peer, some steps are timed and their peak is read. The gradients of the last of them
give the digest, and one more step shows whether the cell repeats them. All steps of a cell run under the same
algorithms. The figures of a session of vdnn are those of the last timed step, because a session that plans measures
every step.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

import vdnn
from benchmarks.harness.cell_spec import CellSpec, cell_of
from benchmarks.harness.determinism import deterministic
from benchmarks.harness.places import MachinePlace, Place, TimedSteps, open_place
from benchmarks.harness.provenance import commit_of_tree, versions_of
from benchmarks.harness.session_figures import note_session
from benchmarks.harness.synthetic_data import Feed
from benchmarks.harness.workloads import workload_named
from benchmarks.models.workload import Workload
from benchmarks.peers import CannotRun, Peer, Trial, peer_named
from vdnn.bytesize import format_bytes
from vdnn.report.cell import FAILED, NOT_RUN, OUT_OF_MEMORY, Cell

SEED = 0
# Steps are timed for at most about this long, but at least one is.
PATIENCE_S = 60.0
# On a GPU a session gets more settling steps, until one was settled.
_MOST_SETTLING = 14


class Compared(NamedTuple):
    """Loss and gradients of a step, by the names of the parameters."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]


class Steps:
    """The steps of one workload: each with the same random numbers and the next batch of its data, without updates."""

    def __init__(self, place: Place, workload: Workload, feed: Feed, *, autocast: bool) -> None:
        self._place = place
        self._workload = workload
        self._feed = feed
        self._autocast = autocast
        self.model: Callable[..., Any] = workload.model
        self.session: vdnn.Session | None = None
        self.loss: torch.Tensor | None = None

    def before(self) -> None:
        torch.manual_seed(SEED)
        self._feed.next()

    def before_compared(self) -> None:
        """Prepare a step whose gradients are compared. It has the first batch for any number of steps before it."""
        torch.manual_seed(SEED)
        self._feed.first()

    def step(self) -> None:
        """Forward pass, loss and backward pass: the part that is timed."""
        inputs, loss = self._workload.inputs, self._workload.loss
        with torch.autocast(self._place.torch_device.type, torch.bfloat16, enabled=self._autocast):
            value = loss(self.model(*inputs))
        value.backward()  # type: ignore[no-untyped-call]
        self.loss = value.detach()

    def after(self) -> None:
        self._workload.model.zero_grad(set_to_none=True)
        self.loss = None
        if self.session is not None:
            self.session.step()

    def times_ns(self, count: int) -> list[int]:
        return self._place.time_steps(TimedSteps(self.before, self.step, self.after), count)

    def compared_times_ns(self, count: int) -> tuple[list[int], Compared]:
        """Time steps. Returns their times, and what the last of them gave."""
        begun = 0

        def before() -> None:
            nonlocal begun
            begun += 1
            self.before_compared() if begun == count else self.before()

        found: list[Compared] = []

        def after() -> None:
            if begun == count:
                found.append(self._compared())
            self.after()

        return self._place.time_steps(TimedSteps(before, self.step, after), count), found[0]

    def repeated(self) -> Compared:
        """Run the step whose gradients are compared again."""
        self.before_compared()
        self.step()
        found = self._compared()
        self.after()
        return found

    def _compared(self) -> Compared:
        if self.loss is None:
            raise RuntimeError("expected a step to have run before its gradients are read")
        return Compared(self.loss, {name: one.grad for name, one in self._workload.model.named_parameters()})


def measure(spec: CellSpec, place: Place | None = None) -> Cell:
    """Measure one cell, at `place` if it is given. Raises what the step raises, except for a lack of memory, which is a
    result."""
    # cuBLAS reads this when it is loaded; without it matrix products are not deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    entry, peer = workload_named(spec.workload), peer_named(spec.peer)
    result = cell_of(spec)
    place = place or open_place(spec.place, spec.hardware)
    result.device, result.clock = place.device, place.clock
    result.versions = versions_of(peer.package) | place.versions()
    result.commit = commit_of_tree()
    reason = peer.refusal(place, entry.blocks)
    if reason is not None:
        result.status, result.said = NOT_RUN, reason
        return result
    try:
        with place, deterministic(strict=False) if spec.deterministic else contextlib.nullcontext():
            torch.manual_seed(SEED)
            with place.making():
                workload, result.batch = entry.make_at(spec.batch, is_tiny=place.is_tiny)
            place.settle(workload)
            feed = Feed(workload, spec.data)
            try:
                steps = Steps(place, workload, feed, autocast=entry.autocast)
                trial = Trial(place, workload, entry.blocks, _budget_told(spec, peer))
                _run(spec, peer, trial, steps, result)
            finally:
                feed.close()
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        result.status, result.said = OUT_OF_MEMORY, first_line(error)
    except CannotRun as error:
        result.status, result.said = NOT_RUN, first_line(error)
    except vdnn.BudgetError as error:
        result.status, result.said = FAILED, first_line(error)
    return result


def _budget_told(spec: CellSpec, peer: Peer) -> int | str | None:
    if not peer.has_budget:
        return None
    return spec.budget_bytes if spec.budget_bytes is not None else spec.budget


def _run(spec: CellSpec, peer: Peer, trial: Trial, steps: Steps, result: Cell) -> None:
    place = trial.place
    is_machine = isinstance(place, MachinePlace)
    settling = peer.virtual_settling_steps if is_machine else peer.settling_steps
    with peer.open(trial) as opened:
        steps.session = opened.session
        steps.model = trial.workload.model if opened.model is None else opened.model
        steps.times_ns(settling)
        count = 1
        if not is_machine:
            if opened.session is not None:
                _settle(opened.session, steps)
            # The allocator's cache from settling steps must not count as reserved; the next step fills it again.
            place.tidy()
            began_s = time.monotonic()
            steps.times_ns(1)
            count = max(1, min(spec.steps, math.ceil(PATIENCE_S / (time.monotonic() - began_s))))
        if opened.moved is not None:  # count only the timed steps
            opened.moved.to_host_bytes = opened.moved.to_device_bytes = opened.moved.stall_ns = 0
        place.reset_peak()
        times_ns, compared = steps.compared_times_ns(count)
        result.step_times_ns = tuple(times_ns)
        result.step_ns = round(statistics.median(result.step_times_ns))
        memory = place.memory()
        result.peak_bytes, result.requested_bytes = memory.peak_bytes, memory.requested_bytes
        result.reserved_bytes, result.host_bytes = memory.reserved_bytes, memory.pinned_bytes
        result.said = opened.said
        if opened.moved is not None:
            result.to_host_bytes = opened.moved.to_host_bytes // count
            result.to_device_bytes = opened.moved.to_device_bytes // count
            result.stall_ns = opened.moved.stall_ns // count
            result.host_bytes = opened.moved.peak_held_bytes
        if opened.session is not None:
            note_session(opened.session, trial, spec, result)
        if place.has_data:
            result.loss, result.gradients = repr(float(compared.loss)), digest_of(compared.gradients)
            del compared  # its gradients are not part of another step
            result.deterministic = digest_of(steps.repeated().gradients) == result.gradients
    if not place.has_data and result.peak_bytes > place.memory_bytes:
        result.status = OUT_OF_MEMORY
        needs = f"needs {format_bytes(result.peak_bytes)} of {format_bytes(place.memory_bytes)}"
        result.said = f"{result.said}; {needs}" if result.said else needs


def _settle(session: vdnn.Session, steps: Steps) -> None:
    """Run steps until one was settled: those before it cost the processor a multiple of what later ones do."""
    for _ in range(_MOST_SETTLING):
        settling = session._engine.steps.settling
        if settling is None or settling.is_expected:
            return
        steps.times_ns(1)


def digest_of(gradients: Mapping[str, torch.Tensor | None]) -> str:
    """A digest of gradients, bit for bit, with their names."""
    digest = hashlib.sha256()
    for name, gradient in gradients.items():
        digest.update(name.encode())
        if gradient is not None:
            content = gradient.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(content.numpy().tobytes())
    return digest.hexdigest()


def is_out_of_memory(error: BaseException) -> bool:
    """True if the device is out of memory. Host memory that cannot be pinned is an ordinary failure."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
