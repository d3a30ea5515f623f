"""The programs of gpu-proof without a GPU: what they find and say, and that they do not stop at the first failure."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.harness import virtual_warmth
from benchmarks.harness.cell_spec import CellSpec, cell_of
from benchmarks.harness.measure import measure
from benchmarks.on_a_gpu import (
    build_in_place,
    machine_report,
    statistics_cost,
    tiny_networks,
    varying_shapes,
    workspace_table,
)
from benchmarks.on_a_gpu.varying_shapes import Varied
from benchmarks.shapes.cases import Case, Subject
from benchmarks.shapes.figures import Executed
from tests import forked
from tests.benchmarks.test_places import MadeUpCuda
from tests.fake_driver.control import LIBRARY
from vdnn.hardware import load_profile
from vdnn.report import Cell
from vdnn.report.run_folder import CELLS_FILE, read_cells


def test_a_machine_without_a_driver_is_told_from_one_without_torch(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert machine_report.main(["--driver", "/nowhere/libcuda.so"]) == machine_report.NO_GPU
    assert capsys.readouterr().out.startswith("no GPU: the CUDA driver library cannot be loaded")
    path = tmp_path / "machine.json"
    assert machine_report.main(["--driver", str(LIBRARY), "--without-gpu", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["gpus"] >= 1
    assert any(line.startswith(f"torch {torch.__version__}") for line in report["lines"])


def test_what_a_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine_report, "TOOLS", ("no-such-tool",))
    monkeypatch.setattr(machine_report, "PACKAGES", {"for tests": ("no_such_package", "json")})
    assert machine_report.main(["--driver", str(LIBRARY), "--without-gpu"]) == 0
    said = capsys.readouterr().out
    assert "tools that are missing: no-such-tool" in said
    assert "packages that are missing: no_such_package (for tests)" in said


def test_a_build_that_fails_is_tried_with_less(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Device code cannot be compiled: the third way leaves it out."""
    tried: list[dict[str, str]] = []

    def run(command: list[str], *, env: dict[str, str] | None = None, **options: Any) -> Any:
        if "-c" in command:
            return subprocess.CompletedProcess(command, 0)
        tried.append({name: value for name, value in (env or {}).items() if name.startswith("VDNN_")})
        return subprocess.CompletedProcess(command, 0 if tried[-1].get("VDNN_NVCC") == "OFF" else 1)

    monkeypatch.setattr(build_in_place.subprocess, "run", run)
    assert build_in_place.main([]) == 0
    assert [settings.get("VDNN_BUILD_TESTING") for settings in tried] == ["ON", "OFF", "OFF"]
    assert "built without device code" in capfd.readouterr().out.splitlines()[-1]


def test_a_core_that_was_built_aside_is_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the folder where setup.py runs then there is no pyproject.toml, which an old setuptools refuses."""
    (tmp_path / "vdnn").mkdir()

    def run(command: list[str], *, cwd: Path, **options: Any) -> Any:
        assert list(cwd.rglob("pyproject.toml")) == []
        (cwd / "vdnn" / "_C.so").write_text("core")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(build_in_place, "ROOT", tmp_path)
    monkeypatch.setattr(build_in_place.subprocess, "run", run)
    assert build_in_place.build(build_in_place.TRIES[-1]) == 0
    assert (tmp_path / "vdnn" / "_C.so").read_text() == "core"


def test_the_core_that_is_there_is_imported(capfd: pytest.CaptureFixture[str]) -> None:
    assert build_in_place.main(["--as-it-is"]) == 0
    assert "_C" in capfd.readouterr().out


def test_calls_are_measured_beside_an_empty_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    assert statistics_cost.main(["--device", "cpu", "--json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0]["call"] == statistics_cost.EMPTY
    assert rows[0]["over_empty"] == 1.0
    assert {row["call"] for row in rows} == set(statistics_cost.calls_of(torch.device("cpu")))
    assert "What a call costs on cpu" in capsys.readouterr().out


def test_a_table_of_workspaces_goes_into_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, into = tmp_path / "rows.jsonl", tmp_path / "h200.json"
    assert workspace_table.main(["--device", "sim", "--json", str(path), "--into", str(into)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["call"].split()[0] for row in rows} == {"convolution", "convolution_backward", "addmm", "mm"}
    assert all(row["measured_bytes"] == row["counted_bytes"] for row in rows), "a virtual machine takes what it counts"
    assert sum(row["measured_bytes"] > 0 for row in rows) > 10
    profile = load_profile(into)
    assert profile.workspaces == {row["call"]: row["measured_bytes"] for row in rows}
    assert "not a measurement" in profile.source_of(f"workspaces.{rows[0]['call']}")
    assert "0 of them take more than a rehearsal counts" in capsys.readouterr().out


def test_on_a_gpu_workspaces_come_from_its_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda is a stand-in: an operation takes 4096 bytes beside its results."""
    cuda = mock.MagicMock()
    cuda.memory_stats.return_value = {"requested_bytes.all.peak": 5096, "requested_bytes.all.current": 1000}
    monkeypatch.setattr(torch, "cuda", cuda)
    meter = workspace_table.WorkspaceMeter("a network", workspace_table.Memory(None), load_profile("h200"))
    x = torch.ones(2, 2)
    with meter:
        for _ in range(3):
            x @ x
        x + x
    (row,) = meter.rows.values()
    assert (row.call, row.measured_bytes, row.counted_bytes) == ("mm float32 2x2 2x2", 4096, 0)
    assert cuda.reset_peak_memory_stats.call_count == 1


def test_on_a_gpu_what_a_hook_calls_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda is a stand-in, and so is the tensor's device."""
    monkeypatch.setattr(torch, "cuda", mock.MagicMock())
    with mock.patch.object(torch, "ones", return_value=mock.MagicMock()):
        calls = statistics_cost.calls_of(torch.device("cuda"))
    assert {"memory_stats_as_nested_dict", "memory_stats", "host_memory_stats", "Event.record, timed"} <= set(calls)
    monkeypatch.setattr(statistics_cost, "TURNS", 1)
    settled = mock.Mock()
    del calls["empty of 1 MiB, and its release"]  # makes a tensor there
    assert len(statistics_cost.measure(calls, settled)) == len(calls) == settled.call_count


def test_the_first_product_on_the_gpu_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is a stand-in."""
    made = mock.MagicMock(__version__="2.11.0")
    product = made.ones.return_value.__matmul__.return_value.sum
    product.return_value = 256.0**3
    made.cuda.mem_get_info.return_value = (60 << 30, 80 << 30)
    made.cuda.get_device_properties.return_value = mock.Mock(major=9, minor=0, multi_processor_count=132)
    made.cuda.get_device_properties.return_value.name = "A card"
    monkeypatch.setattr(machine_report.importlib, "import_module", lambda name: made)
    lines = machine_report.torch_lines(on_gpu=True)
    assert "A card, capability 9.0, 132 SMs, 60.0 of 80.0 GiB free" in lines
    product.return_value = 0.0
    with pytest.raises(RuntimeError, match="expected 16777216.0 from a product on the GPU, got 0.0"):
        machine_report.torch_lines(on_gpu=True)


# Networks of a tiny size.


def test_every_tiny_network_is_trained_and_one_of_each_kind_comes_first() -> None:
    names = tiny_networks.names()
    assert names[: len(tiny_networks.FIRST)] == list(tiny_networks.FIRST)
    assert len(names) == len(set(names)) > 30


def test_on_a_gpu_the_tiny_size_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is a stand-in, and the tensors are on the CPU. Its requested bytes are 500 in every cell."""
    budgets: list[int | None] = []

    def measured(spec: CellSpec, place: tiny_networks.TinyCudaPlace) -> Cell:
        budgets.append(spec.budget_bytes)
        if spec.peer != "plain":  # a session needs a GPU
            return cell_of(spec, status="ok")
        assert place.is_tiny
        place.torch_device = torch.device("cpu")
        return measure(spec, place)

    monkeypatch.setattr(tiny_networks, "TinyCudaPlace", partial(tiny_networks.TinyCudaPlace, MadeUpCuda()))
    monkeypatch.setattr(tiny_networks, "measure", measured)
    plain, *_ = tiny_networks.cells_of("gpt2", "cuda", "")
    assert (plain.status, plain.place, plain.deterministic, plain.requested_bytes) == ("ok", "cuda", True, 500)
    assert budgets == [None, None, 400, None, None]


@pytest.mark.slow
def test_a_network_that_fails_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    measured = tiny_networks.measure

    def measure(spec: Any, place: Any) -> Cell:
        if spec.peer == "vdnn-all":
            raise RuntimeError("CUDA error: an illegal memory access\nmore")
        return measured(spec, place)

    monkeypatch.setattr(tiny_networks, "measure", measure)
    assert tiny_networks.main(["--place", "sim", "--workloads", "gpt2", "--out", str(tmp_path)]) == 1
    cells = read_cells(tmp_path / CELLS_FILE)
    assert [(cell.peer, cell.status, cell.identical) for cell in cells] == [
        ("plain", "ok", None),
        ("vdnn-all", "failed", None),
        ("vdnn-auto", "ok", True),
        ("vdnn-auto", "ok", True),
        ("vdnn-auto-offload", "ok", True),
    ]
    assert cells[1].said == "RuntimeError: CUDA error: an illegal memory access"
    said = capfd.readouterr()
    assert "3 of 4 have plain's gradients, 0 cannot be compared, 1 failed" in said.out
    assert "Traceback" in said.err


def test_other_gradients_are_a_failure_and_a_budget_that_no_plan_meets_is_none() -> None:
    assert tiny_networks.verdict_of(Cell("net", "vdnn-all", identical=False)) == "gradients differ from plain's"
    refused = Cell("net", "vdnn-auto", status="failed", said="budget 1 cannot be met: 2 are needed")
    assert tiny_networks.verdict_of(refused) == ""


def test_no_network_begins_behind_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_networks.main(["--place", "sim", "--workloads", "gpt2", "--limit-s", "-1"]) == 0
    assert "the time is over: gpt2" in capsys.readouterr().out


# Shapes that vary.


def steps(*peaks: int, step_ns: int = 10) -> tuple[Executed, ...]:
    return tuple(Executed(step_ns, peak) for peak in peaks)


@pytest.mark.parametrize(
    ("ours", "same", "is_good"),
    [
        (steps(60, 59), True, True),
        (steps(60, 61), True, False),
        (steps(60, 59), False, False),
        (steps(60, 59), None, True),
    ],
)
def test_a_step_over_the_budget_and_other_parameters_are_failures(
    ours: tuple[Executed, ...], same: bool | None, is_good: bool
) -> None:
    assert Varied("case", "", 60, steps(100, 80), ours, same).is_good is is_good


def test_the_time_of_a_case_is_that_behind_its_first_steps() -> None:
    plain = (*steps(*[100] * 5, step_ns=1000), *steps(*[100] * 2))
    ours = (*steps(*[60] * 5, step_ns=9000), *steps(*[60] * 2, step_ns=15))
    found = Varied("case", "", 60, plain, ours, True)
    assert found.over_plain == 1.5
    assert "0 of 7 steps over the budget, highest 1.000 of it; 1.500 x plain's time" in str(found)


def test_a_case_over_its_budget_says_why_and_what_it_is_without_recipes() -> None:
    found = Varied("case", "", 60, steps(100, 80), steps(60, 61), True, "1 differed from its plan", steps(60, 60))
    assert "1 of 2 steps over the budget, highest 1.017 of it (1 differed from its plan; without recipes 0)" in str(
        found
    )


def test_each_step_over_the_budget_is_named_beside_what_tells_its_cause() -> None:
    mib = 1 << 20
    plain = steps(100 * mib, 260 * mib, 200 * mib, 300 * mib)
    ours, without = steps(60 * mib, 99 * mib, 99 * mib, 120 * mib), steps(60 * mib, 98 * mib, 90 * mib, 90 * mib)
    sizes = ((2, 128), (2, 192), (3, 224), (2, 256))
    found = Varied("case", "", 90 * mib, plain, ours, True, "", without, sizes)
    assert found.steps_over == [
        "  step 2, size (2, 192): 1.100 of the budget, without recipes 1.089; "
        "plain 260 MiB, and by sizes 128 and 256 200",
        "  step 3, size (3, 224): 1.100 of the budget, without recipes 1.000; plain 200 MiB",
        "  step 4, size (2, 256): 1.333 of the budget, without recipes 1.000; plain 300 MiB",
    ]


@pytest.mark.slow
def test_a_case_is_trained_plain_and_under_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    options = ["--device", "virtual", "--cases", "smaller last batch", "--steps", "7", "--json", str(path)]
    assert varying_shapes.main(options) == 0
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(row["plain"]) == len(row["ours"]) == 7
    assert max(step["peak_bytes"] for step in row["ours"]) <= row["budget_bytes"]
    assert row["budget_bytes"] < max(step["peak_bytes"] for step in row["plain"])
    assert "no data to compare" in capsys.readouterr().out


def test_on_a_gpu_steps_are_timed_by_events_and_parameters_are_compared() -> None:
    """The GPU is a stand-in, and the tensors are on the CPU."""

    def make() -> Subject:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(size: Any) -> None:
            optimizer.zero_grad()
            model(torch.ones(size[0], 4)).sum().backward()
            optimizer.step()

        return Subject([optimizer], train)

    def trained(sizes: tuple[tuple[int], ...]) -> varying_shapes.Trained:
        case = Case("linear", make, sizes)
        return varying_shapes.trained(case, varying_shapes.GpuClock(MadeUpCuda(), "cpu"), None, 2)

    executed, digest, _ = trained(((1,), (2,), (3,)))
    assert executed == (Executed(1_000_000, 500),) * 2, "nothing but the step is between the two events"
    assert digest == trained(((1,), (2,)))[1] != trained(((1,), (3,)))[1]


def test_a_case_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(*arguments: Any) -> Any:
        raise RuntimeError("CUDA error\nmore")

    monkeypatch.setattr(varying_shapes, "trained", failing)
    assert varying_shapes.main(["--device", "virtual", "--cases", "decoder"]) == 1
    assert "decoder: RuntimeError: CUDA error\n" in capsys.readouterr().out


# Places and forks.


def test_no_backward_pass_runs_before_a_fork_where_torch_is_built_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There autograd refuses a backward pass in a fork of a process that has run one."""
    entered = mock.Mock(side_effect=AssertionError("a step runs"))
    monkeypatch.setattr(virtual_warmth.vdnn, "VirtualMachine", entered)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    virtual_warmth.warm_up()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(AssertionError, match="a step runs"):
        virtual_warmth.warm_up()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["statistics_cost", "tiny_networks", "varying_shapes", "workspace_table"])
def test_without_a_gpu_a_program_says_how_to_try_it(program: str, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = forked.run(forked.run_module, f"benchmarks.on_a_gpu.{program}", folder=tmp_path)
    assert done.returncode == 2
    assert f"{program}: torch sees no GPU here: --" in done.stderr
