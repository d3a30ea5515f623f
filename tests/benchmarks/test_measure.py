"""Measuring one cell: real gradients at a tiny size, figures in virtual time, and every kind of failure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.harness import measure as measured_module
from benchmarks.harness.cell_spec import CellSpec
from benchmarks.harness.measure import _settle, digest_of, measure
from benchmarks.harness.places import CudaPlace, MachinePlace
from benchmarks.harness.session_figures import probed_link
from benchmarks.harness.synthetic_data import DataOptions
from benchmarks.harness.workloads import WORKLOADS, BenchmarkWorkload
from benchmarks.peers import PEERS, CannotRun, Opened, Peer, Trial
from benchmarks.peers.peer import Moved
from benchmarks.peers.save_on_cpu import MODELLED, BlockingCopies
from tests.benchmarks.test_places import MadeUpCuda
from vdnn import Plan, Recording, Timeline, VirtualMachine
from vdnn._C import SimDevice
from vdnn.hardware import load_profile
from vdnn.hardware.link_probe import measure_link
from vdnn.report.cell import FAILED, NOT_RUN, OK, OUT_OF_MEMORY, Cell, cell_as_json, cell_from_json

pytestmark = pytest.mark.slow


def sim(peer: str, budget: str | None = None, **fields: object) -> Cell:
    return measure(CellSpec("gpt2", peer, "sim", "h100", budget, **fields))  # type: ignore[arg-type]


def test_every_peer_that_runs_on_the_simulated_device_has_plains_gradients() -> None:
    plain = sim("plain")
    assert plain.status == OK
    assert plain.gradients is not None
    assert plain.loss is not None
    for peer in ("checkpoint", "checkpoint-selective", "save-on-cpu-pinned", "vdnn-all", "vdnn-auto-offload"):
        other = sim(peer, "min" if PEERS[peer].has_budget else None)
        assert (other.status, other.loss) == (OK, plain.loss), peer
        # torch's pinned copies do not keep strides, so backward may run other products, with other last bits.
        assert other.gradients == plain.gradients or peer == "save-on-cpu-pinned", peer
        assert other.peak_bytes is not None
        assert plain.peak_bytes is not None
        assert other.peak_bytes < plain.peak_bytes, peer


def test_the_digest_sees_a_single_bit_and_a_missing_gradient() -> None:
    ones = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    changed = torch.tensor([1.0, torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))])
    found = {digest_of(ones), digest_of({**ones, "bias": changed}), digest_of({**ones, "bias": None})}
    assert len(found) == 3


class Doubled(Peer):
    """A peer whose chosen steps have a loss that is twice as large, and so have their gradients."""

    name = "plain"

    def __init__(self, doubled: Callable[[int], bool]) -> None:
        self._doubled = doubled
        self._forwards = 0

    @contextlib.contextmanager
    def open(self, trial: Trial) -> Iterator[Opened]:
        def forward(*inputs: object) -> torch.Tensor:
            self._forwards += 1
            found: torch.Tensor = trial.workload.model(*inputs)
            return found * 2 if self._doubled(self._forwards) else found

        yield Opened(model=forward)


# On a virtual machine plain takes no settling step: the first forward is timed, the second repeats it.
TIMED, REPEATED = 1, 2


@pytest.mark.parametrize(
    ("doubled", "differs", "repeats"),
    [({TIMED, REPEATED}, True, True), ({TIMED}, True, False), ({REPEATED}, False, False), (set[int](), False, True)],
)
def test_the_gradients_are_those_of_the_timed_step(
    monkeypatch: pytest.MonkeyPatch, doubled: set[int], differs: bool, repeats: bool
) -> None:
    plain = sim("plain")
    monkeypatch.setattr(measured_module, "peer_named", lambda name: Doubled(doubled.__contains__))
    found = sim("plain")
    assert (found.gradients != plain.gradients, found.loss != plain.loss) == (differs, differs)
    assert found.deterministic is repeats


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_all_steps_of_a_cell_run_under_the_same_algorithms(
    monkeypatch: pytest.MonkeyPatch, is_deterministic: bool
) -> None:
    seen: list[bool] = []

    def look(forward: int) -> bool:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return False

    monkeypatch.setattr(measured_module, "peer_named", lambda name: Doubled(look))
    sim("plain", deterministic=is_deterministic)
    assert seen == [is_deterministic] * 2
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_session_tells_of_its_step_and_leaves_its_files(tmp_path: Path) -> None:
    result = sim("vdnn-auto", "min", run=str(tmp_path), batch=8)
    assert result.step == "gpt2-b8-vdnn-auto-min-sim-h100"
    folder = tmp_path / "steps" / result.step
    timeline = Timeline.load(folder / "measured.json")
    plan = Plan.load(folder / "plan.json")
    assert Recording.load(folder / "recording.json").peak_bytes >= timeline.peak_bytes
    predicted = Timeline.load(folder / "predicted.json")
    assert (result.predicted_step_ns, result.predicted_peak_bytes) == (predicted.step_ns, predicted.peak_bytes)
    assert (result.stall_ns, result.budget_bytes) == (timeline.stall_ns, plan.budget_bytes)
    assert result.step_times_ns == (result.step_ns,)
    assert result.versions["torch"] == torch.__version__
    assert cell_from_json(json.loads(json.dumps(cell_as_json(result))), "here") == result


def test_a_prediction_for_a_gpu_has_the_rates_of_its_link() -> None:
    found = probed_link(SimDevice)
    probed = measure_link(SimDevice())
    assert found.to_host_bytes_per_s == pytest.approx(probed.to_host_bytes_per_s, rel=0.01)
    assert found.duplex_bytes_per_s == pytest.approx(probed.both_ways_bytes_per_s, rel=0.01)

    def without_memory() -> SimDevice:
        raise RuntimeError("out of memory")

    assert probed_link(without_memory).latency_ns == 10_000


def test_in_virtual_time_a_plan_takes_what_was_predicted() -> None:
    """Convolutions are offloaded as whole storages, so measured and predicted agree to the nanosecond and the byte."""
    result = measure(CellSpec("unet", "vdnn-auto", "virtual", "h100", "60%", 4_000_000_000, batch=8))
    assert result.status == OK
    assert (result.step_ns, result.peak_bytes) == (result.predicted_step_ns, result.predicted_peak_bytes)
    assert result.peak_bytes is not None
    assert result.peak_bytes <= 4_000_000_000
    assert (result.loss, result.gradients, result.clock) == (None, None, "virtual")


def test_what_does_not_fit_the_card_in_virtual_time_is_out_of_memory_and_has_its_figures() -> None:
    """U-Net takes more than 6 GiB at batch 8, so at batch 32 it exceeds the 12 GiB of the Titan X."""
    result = measure(CellSpec("unet", "plain", "virtual", "titan-x", batch=32))
    assert result.status == OUT_OF_MEMORY
    assert result.peak_bytes is not None
    assert result.peak_bytes > load_profile("titan-x").memory_bytes
    assert "of 12.00 GiB" in result.said


def test_a_budget_below_the_least_is_a_failure_that_says_the_least() -> None:
    result = measure(CellSpec("unet", "vdnn-auto", "virtual", "h100", "1%", 60_000_000, batch=8))
    assert result.status == FAILED
    assert "cannot be met" in result.said


@pytest.mark.parametrize(
    ("workload", "peer", "place", "said"),
    [
        ("lstm", "checkpoint", "sim", "expected blocks"),
        ("gpt2", "save-on-cpu-pageable", "sim", "no hardware profile has a rate for pageable memory"),
        ("gpt2", "compiled-offload", "virtual", "a virtual machine cannot see operations of compiled code"),
    ],
)
def test_what_cannot_run_there_says_why(workload: str, peer: str, place: str, said: str) -> None:
    result = measure(CellSpec(workload, peer, place, "h100"))
    assert result.status == NOT_RUN
    assert said in result.said
    assert result.step_ns is None


@pytest.mark.parametrize("peer", ["trl", "torchtune", "deepspeed-checkpoint"])
def test_a_foreign_peer_runs_only_where_it_is_installed_and_on_a_gpu(peer: str) -> None:
    result = sim(peer)
    assert result.status == NOT_RUN
    assert "cannot be imported" in result.said or "CPU" in result.said or "GPU" in result.said


class Broken(Peer):
    """A peer that raises the given error in the step."""

    name = "broken"

    def __init__(self, error: Exception) -> None:
        self._error = error

    @contextlib.contextmanager
    def open(self, trial: Trial) -> Iterator[Opened]:
        def forward(*inputs: object) -> object:
            raise self._error

        yield Opened(model=forward)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), OUT_OF_MEMORY),
        (RuntimeError("CUDA error: out of memory"), OUT_OF_MEMORY),
        (CannotRun("nothing to do"), NOT_RUN),
    ],
)
def test_want_of_memory_is_a_result(monkeypatch: pytest.MonkeyPatch, error: Exception, status: str) -> None:
    monkeypatch.setattr(measured_module, "peer_named", lambda name: Broken(error))
    result = sim("plain")
    assert (result.status, result.said) == (status, str(error))


def test_any_other_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_module, "peer_named", lambda name: Broken(RuntimeError("stride assertion")))
    with pytest.raises(RuntimeError, match="stride assertion"):
        sim("plain")


def test_a_loader_brings_the_batches_of_the_steps() -> None:
    """Other inputs give another loss. Peers agree, although one takes more steps before its gradients are read."""
    fixed = sim("plain")
    loaded = sim("plain", data=DataOptions(workers=0))
    assert loaded.status == OK
    assert loaded.loss != fixed.loss
    assert sim("vdnn-auto", "min", data=DataOptions(workers=0)).gradients == loaded.gradients
    assert sim("checkpoint", data=DataOptions(workers=2)).gradients == loaded.gradients, "forked amid a machine's modes"


def test_on_a_gpu_a_cell_settles_tidies_and_then_times_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is a stand-in and the tensors are on the CPU. Checks which calls the GPU gets, in which order."""
    cuda = MadeUpCuda()
    place = CudaPlace(cuda)
    place.torch_device = torch.device("cpu")
    tiny = WORKLOADS["gpt2"].tiny
    assert tiny is not None
    entry = BenchmarkWorkload("tiny", tiny, 4, None, blocks=("Block",), autocast=True)
    monkeypatch.setattr(measured_module, "open_place", lambda name, hardware: place)
    monkeypatch.setattr(measured_module, "workload_named", lambda name: entry)
    result = measure(CellSpec("tiny", "checkpoint", "cuda", "", steps=3))
    assert (result.status, result.clock, result.batch) == (OK, "device", 4)
    assert (result.peak_bytes, result.requested_bytes, result.reserved_bytes, result.host_bytes) == (512, 500, 2048, 70)
    assert len(result.step_times_ns) == 3
    assert result.gradients is not None
    assert result.deterministic is True
    # One step settles and one refills the cache; three are timed. Each waits before its start and after its end.
    timed = [name for name in cuda.log if name in ("record", "empty_cache", "reset_peak_memory_stats", "memory_stats")]
    settled, filled = ["record"] * 2, ["record"] * 2
    assert timed == [
        *(*settled, "empty_cache", *filled, "reset_peak_memory_stats", *["record"] * 6, "memory_stats"),
    ]


# The copies that the model of save_on_cpu makes.


@pytest.mark.parametrize("has_data", [True, False])
def test_modelled_copies_block_for_their_bytes_each_way(has_data: bool) -> None:
    """sin saves its input, 4 bytes an element, and nothing else is saved: one copy to the host and one back."""
    profile = load_profile("h100")
    nbytes = 4 * 1024
    moved = Moved()
    with VirtualMachine(profile, fake=not has_data) as machine:
        hooks = BlockingCopies(machine, moved, has_data=has_data)
        x = torch.arange(1024.0, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            y = x.sin()
            y.sum().backward()
        if has_data:
            assert x.grad is not None
            assert torch.equal(x.grad, x.detach().cos())
    out_ns = round(nbytes / profile.to_host_bytes_per_s * 1e9) + profile.link_latency_ns
    back_ns = round(nbytes / profile.to_device_bytes_per_s * 1e9) + profile.link_latency_ns
    assert (moved.to_host_bytes, moved.to_device_bytes, moved.held_bytes) == (nbytes, nbytes, 0)
    assert moved.stall_ns == out_ns + back_ns


def test_a_modelled_peer_says_that_it_is() -> None:
    assert sim("save-on-cpu-pinned").said == MODELLED


def test_a_place_without_data_and_one_with_it_count_the_same_memory() -> None:
    """Steps the same tiny model in both places."""
    peaks = []
    for has_data in (True, False):
        with MachinePlace("h100", has_data=has_data) as place:
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
            x = torch.ones(16, 64)
            place.machine.tracker.track([model, x])
            place.reset_peak()
            model(x).sum().backward()
            peaks.append(place.memory().peak_bytes)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_session_settles_before_it_is_timed_whether_or_not_its_bits_count(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[object] = []
    place = CudaPlace(MadeUpCuda())
    place.torch_device = torch.device("cpu")
    tiny = WORKLOADS["gpt2"].tiny
    assert tiny is not None
    monkeypatch.setattr(measured_module, "open_place", lambda name, hardware: place)
    monkeypatch.setattr(measured_module, "workload_named", lambda name: BenchmarkWorkload("tiny", tiny, 4, None))
    monkeypatch.setattr(measured_module, "_settle", lambda session, steps: settled.append(session))
    with VirtualMachine("titan-x", fake=False) as machine:
        monkeypatch.setattr(place, "vdnn_device", machine)
        found = measure(CellSpec("tiny", "vdnn-all", "cuda", "", steps=1, deterministic=deterministic))
    assert found.status == OK, found.said
    assert len(settled) == 1


@pytest.mark.parametrize(("settles_after", "steps_run"), [(0, 0), (3, 3), (99, 14)])
def test_a_session_on_a_gpu_gets_steps_until_one_is_settled(settles_after: int, steps_run: int) -> None:
    settling = SimpleNamespace(is_expected=settles_after == 0)
    run = 0

    def times_ns(count: int) -> None:
        nonlocal run
        run += count
        settling.is_expected = run >= settles_after

    session = SimpleNamespace(_engine=SimpleNamespace(steps=SimpleNamespace(settling=settling)))
    _settle(session, SimpleNamespace(times_ns=times_ns))  # type: ignore[arg-type]
    assert run == steps_run
