"""Places: only the step runs between the two ends of a timed step. The GPU is a stand-in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.harness.measure import Steps
from benchmarks.harness.places import STEP_HAS_OPTIMIZER, CudaPlace, MachinePlace, Place, TimedSteps, open_place
from benchmarks.harness.synthetic_data import DataOptions, Feed
from benchmarks.models.workload import Workload


class MadeUpEvent:
    """An event that logs when it is recorded."""

    def __init__(self, log: list[str], enable_timing: bool) -> None:
        assert enable_timing
        self._log = log
        self._at = 0

    def record(self) -> None:
        self._at = len(self._log)
        self._log.append("record")

    def elapsed_time(self, end: MadeUpEvent) -> float:
        """Returns, in ms, how many calls were logged between the two events."""
        return float(end._at - self._at)


class MadeUpCuda:
    """The part of torch.cuda that CudaPlace uses. It logs every call."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def Event(self, enable_timing: bool) -> MadeUpEvent:  # noqa: N802 - torch's name
        self.log.append("event")
        return MadeUpEvent(self.log, enable_timing)

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any) -> Any:
            self.log.append(name)
            return {"max_memory_allocated": 512, "max_memory_reserved": 2048}.get(
                name, {"requested_bytes.all.peak": 500, "allocated_bytes.peak": 70}
            )

        return called


def test_on_a_gpu_nothing_is_done_between_the_events_but_the_step() -> None:
    cuda = MadeUpCuda()
    place = CudaPlace(cuda)

    def note(what: str) -> Any:
        return lambda: cuda.log.append(what)

    times_ns = place.time_steps(TimedSteps(note("before"), note("step"), note("after")), 3)
    one_step = ["before", "record", "step", "record", "after"]
    assert cuda.log == ["event"] * 6 + ["synchronize"] + 3 * one_step + ["synchronize"]
    assert times_ns == [2_000_000] * 3, "the step, and the second event's own place in the log"


def test_on_a_gpu_peaks_are_torchs_and_are_reset() -> None:
    cuda = MadeUpCuda()
    place = CudaPlace(cuda)
    place.reset_peak()
    memory = place.memory()
    assert (memory.peak_bytes, memory.requested_bytes, memory.reserved_bytes, memory.pinned_bytes) == (
        *(512, 500, 2048, 70),
    )
    assert cuda.log[0] == "reset_peak_memory_stats"


def test_without_a_gpu_the_place_says_which_others_there_are() -> None:
    class NoCuda:
        def is_available(self) -> bool:
            return False

    with pytest.raises(RuntimeError, match="torch sees no GPU here. The places 'virtual' and 'sim' need none"):
        CudaPlace(NoCuda())
    with pytest.raises(ValueError, match="expected one of cuda, sim, virtual, got 'moon'"):
        open_place("moon", "h100")


class Watched(nn.Module):
    """A model that notes, whenever it runs, the saved-tensor hooks, the machine's clock and its allocated bytes."""

    def __init__(self, place: MachinePlace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.place = [place]
        self.seen: list[tuple[Any, int, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        machine = self.place[0].machine
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.seen.append((hooks, machine.now_ns, machine.allocated_bytes))
        return x * self.weight


@pytest.mark.parametrize("has_data", [True, False])
def test_a_timed_step_has_no_hook_no_time_and_no_memory_of_the_harness(has_data: bool) -> None:
    """The machine's clock and memory are noted right before a step and first thing in it: they are equal."""
    noted: list[tuple[int, int]] = []
    place: Place
    with MachinePlace("h100", has_data=has_data) as place:
        assert isinstance(place, MachinePlace)
        model = Watched(place)
        workload = Workload(model, (torch.ones(8, 64),), lambda out: out.sum())
        place.settle(workload)
        steps = Steps(place, workload, Feed(workload, DataOptions()), autocast=False)

        def before() -> None:
            steps.before()
            noted.append((place.machine.now_ns, place.machine.allocated_bytes))

        place.time_steps(TimedSteps(before, steps.step, steps.after), 3)
        after = place.machine.allocated_bytes
    assert [seen[1:] for seen in model.seen] == noted
    assert [seen[0] for seen in model.seen] == [None] * 3
    assert after == noted[0][1], "gradients are gone again"


def test_a_step_is_forward_loss_and_backward() -> None:
    """There is no optimizer, so the weights do not change and every step is the same."""
    assert not STEP_HAS_OPTIMIZER
    with MachinePlace("h100", has_data=True) as place:
        model = nn.Linear(4, 4)
        workload = Workload(model, (torch.ones(2, 4),), lambda out: out.square().sum())
        place.settle(workload)
        steps = Steps(place, workload, Feed(workload, DataOptions()), autocast=False)
        was = model.weight.detach().clone()
        first, second = steps.times_ns(2)
        assert torch.equal(model.weight, was)
        assert first == second > 0
