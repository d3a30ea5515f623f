"""vdnn.plan and `python -m vdnn plan`: the plan runs as they predict, and each mistake is reported in a sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.rehearsal.programs import perceptron as mlp
from vdnn.bytesize import format_bytes
from vdnn.cli.main import main
from vdnn.errors import BudgetError, VdnnError
from vdnn.hardware import load_profile
from vdnn.planning.catalogue import planner_names
from vdnn.runtime.machine.measured_hardware import measured_profile
from vdnn.runtime.rehearsal import largest_batch
from vdnn.runtime.rehearsal.cuda_shaped import CudaShaped
from vdnn.runtime.rehearsal.rehearsal import rehearse

pytestmark = pytest.mark.slow

UNET = "benchmarks.models:unet"
PERCEPTRON = "tests.runtime.rehearsal.programs:perceptron"
KEYS = {
    *("model", "batch", "hardware", "backend", "budget_bytes", "policy", "plan_seconds", "memory", "libraries"),
    *("predicted", "executed", "actions"),
}


def plan_of(*arguments: Any, **options: Any) -> vdnn.PlanReport:
    return vdnn.plan(*arguments, **{"hardware": "titan-x", **options})


def test_what_it_predicts_is_what_runs() -> None:
    report = plan_of(mlp, 8192, budget="min")
    assert report.executed is not None
    assert report.executed.step_ns == report.planned.timeline.step_ns
    assert report.executed.peak_bytes == report.planned.timeline.peak_bytes == report.memory.floor
    assert report.memory.parameters == 8 * (512 * 512 + 512) * 4
    assert report.memory.gradients == report.memory.parameters
    assert report.memory.feature_maps == (8 + 1) * 8192 * 512 * 4, "what each layer makes, and the input"


def test_a_module_and_its_inputs_stay_as_they_are() -> None:
    model, x = mlp(4096)
    before = [parameter.clone() for parameter in model.parameters()]
    by_module = plan_of(model, x, budget="min")
    by_function = plan_of(mlp, 4096, budget="min")
    assert by_module.planned.timeline.step_ns == by_function.planned.timeline.step_ns
    assert by_module.planned.timeline.copies == by_function.planned.timeline.copies
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    named = plan_of(Named(), {"x": torch.randn(4096, 512)}, budget="min")
    assert named.planned.recording.lifetimes


class Named(nn.Module):
    """Takes its input by name and returns its loss in an object, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(1)[0]

    def forward(self, x: torch.Tensor) -> Any:
        class Output:
            loss = self.inner(x).mean()

        return Output()


@pytest.mark.parametrize(("optimizer", "one_by_one"), [("sgd", 1), ("momentum", 3), ("adamw", 10)])
def test_an_optimizer_launches_for_all_parameters_at_once(optimizer: str, one_by_one: int) -> None:
    def deep(batch: int) -> tuple[nn.Module, torch.Tensor]:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))), torch.randn(batch, 4)

    plain, updated = (plan_of(deep, 8, optimizer=one, min_bytes=0) for one in (None, optimizer))
    added_ns = updated.planned.recording.compute_ns - plain.planned.recording.compute_ns
    # AdamW reads two counters for each parameter. With a GPU they are on the host, but they are charged all the same.
    assert 0 < added_ns < 100 * one_by_one * load_profile("titan-x").kernel_launch_ns / 4


def test_an_optimizer_adds_its_state() -> None:
    plain, adam = plan_of(mlp, 2048), plan_of(mlp, 2048, optimizer="adamw")
    assert plain.memory.optimizer == 0
    assert adam.memory.optimizer >= 2 * adam.memory.parameters
    assert adam.planned.recording.peak_bytes >= plain.planned.recording.peak_bytes + 2 * adam.memory.parameters


def test_more_than_the_card_has_is_refused_with_the_least() -> None:
    with pytest.raises(BudgetError) as refused:
        plan_of(mlp, 8192, budget="1MiB")
    assert plan_of(mlp, 8192, budget="min").planned.timeline.peak_bytes == refused.value.least_bytes


def test_it_says_when_it_will_not_help() -> None:
    report = plan_of(mlp, 256, optimizer="adamw", min_bytes="64KiB")
    assert report.advice is not None
    assert report.advice.startswith(
        f"keep everything: it fits, in {format_bytes(report.memory.floor)}. No plan takes less"
    )
    assert "the optimizer's step" in report.advice


def test_a_note_is_about_the_plan_at_hand() -> None:
    cheap, dear = plan_of(mlp, 8192), plan_of(mlp, 8192, policy="vdnn-all")
    peak = format_bytes(dear.planned.recording.peak_bytes)
    assert cheap.advice == f"keep everything: it fits, in {peak}."
    slower = f"{100 * (dear.planned.slowdown - 1):.1f} % longer"
    assert dear.advice == f"keep everything: it fits, in {peak}; this plan takes {slower}."
    middle = (dear.memory.floor + 3 * dear.planned.recording.peak_bytes) // 4
    hidden = plan_of(mlp, 8192, budget=middle)
    least = plan_of(mlp, 8192, budget="min", policy="vdnn-all", hardware="h100")
    assert hidden.planned.slowdown < 1.25
    assert hidden.advice is None, "its copies are hidden"
    assert least.planned.slowdown > 1.25
    assert least.advice is not None
    assert least.advice.startswith("this plan is slow because of the link: its copies take ")


def test_dropout_saves_the_mask_that_a_gpu_saves() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        with CudaShaped():
            dropped = nn.functional.dropout(x, 0.5)
            in_training = nn.Dropout(0.25)(x)
        assert [one.dtype for one in saved] == [torch.bool, torch.bool]
        nn.functional.dropout(x, 0.5)
        assert saved[-1].dtype == torch.float32, "what the CPU does by itself"
    for out, part in ((dropped, 0.5), (in_training, 0.75)):
        assert 0.8 * part < (out != 0).float().mean().item() < 1.2 * part
        assert torch.allclose(out[out != 0], (x / part)[out != 0])
    with CudaShaped():
        assert torch.equal(nn.Dropout(0.5).eval()(x), x)


def test_attention_with_dropout_saves_no_matrix() -> None:
    query = torch.randn(2, 4, 128, 16, requires_grad=True)
    saved: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one.nbytes) or one, lambda one: one)
    with hooks, CudaShaped():
        nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.1)
    assert max(saved) < 2 * 4 * 128 * 128 * 4


@pytest.mark.parametrize(
    ("model", "batch", "options", "kind", "message"),
    [
        (3, 2, {}, TypeError, "plan: expected a module or a function of a batch size, got int."),
        (mlp, 0, {}, ValueError, "batch: expected a number, 1 or more, got 0."),
        (mlp, "x", {}, ValueError, "batch: expected a number, 1 or more, got 'x'."),
        (lambda batch: batch, 2, {}, TypeError, "the function must return .* it returned an int."),
        (mlp, 2, {"hardware": "abacus"}, VdnnError, "hardware profile: expected one of a100-40"),
        (mlp, 2, {"policy": "best"}, ValueError, "policy: expected one of 'auto'"),
        (mlp, 2, {"optimizer": "magic"}, ValueError, "optimizer: expected one of 'sgd', 'momentum', 'adamw'"),
        (mlp, 2, {"budget": "0%"}, ValueError, "budget: expected more than 0 %"),
        (mlp, 2, {}, VdnnError, "the step saves no tensor of 1MiB or more"),
    ],
)
def test_bad_input(model: Any, batch: Any, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        plan_of(model, batch, **options)


# The command.


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran(capsys, UNET, "--batch", "4", "--hardware", "titan-x", "--budget", "min", "--json")
    assert code == 0
    found = json.loads(out)
    assert set(found) == KEYS
    assert found["executed"] == {
        "step_ns": found["predicted"]["step_ns"],
        "peak_bytes": found["predicted"]["peak_bytes"],
    }
    assert found["predicted"]["bound_ns"] <= found["predicted"]["step_ns"]
    assert found["predicted"]["peak_bytes"] <= found["budget_bytes"] == found["memory"]["floor"]
    count, moved = found["actions"]["OFFLOAD"]
    assert count
    assert moved == found["predicted"]["host_bytes"]


def test_the_command_compares(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = (PERCEPTRON, "--batch", "8192", "--hardware", "titan-x", "--compare")
    code, out, _ = ran(capsys, *wanted, "auto,keep", "--json")
    assert code == 0
    assert [one["policy"] for one in json.loads(out)] == ["auto", "keep"]
    code, out, _ = ran(capsys, *wanted, "all", "--no-bound")
    assert code == 0
    assert all(f"\n{name} " in out for name in planner_names())


def test_the_command_explains_each_choice(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = (UNET, "--batch", "4", "--hardware", "h100", "--budget", "min", "--explain", "9", "--no-bound")
    code, out, _ = ran(capsys, *wanted, "--json")
    assert code == 0
    storages = json.loads(out)["storages"]
    assert len(storages) == 9
    assert [one["bytes"] for one in storages] == sorted((one["bytes"] for one in storages), reverse=True)
    assert {one["action"] for one in storages} >= {"OFFLOAD", "RECOMPUTE"}
    for one in storages:
        assert one["second_best"] != one["action"]
        assert (one["second_best"] is None) is (one["more_ns"] is None)
        assert one["action"] != "RECOMPUTE" or one["recompute"]
    assert any(one["more_ns"] for one in storages), "another choice would have cost something"
    code, out, _ = ran(capsys, *wanted)
    assert "the largest storages, and the reasons for their actions:" in out
    assert "recompute: " in out


@pytest.mark.parametrize("budget", [None, "4GiB"])
def test_the_command_finds_the_largest_batch(budget: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    budget_bytes = int(0.9 * load_profile("titan-x").memory_bytes) if budget is None else 4 << 30
    wanted = [PERCEPTRON, "--batch", "8192", "--hardware", "titan-x", "--largest-batch", "--no-bound"]
    rehearsed: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(largest_batch, "rehearse", lambda *one, **two: rehearsed.append(1) or rehearse(*one, **two))
        _, out, _ = ran(capsys, *wanted, *(() if budget is None else ("--budget", budget)))
    (line,) = (line for line in out.splitlines() if "largest batch:" in line)
    kept, least = _numbers(line)
    assert 1 <= kept < least
    assert len(rehearsed) <= 14
    assert plan_of(mlp, kept, budget="min").planned.recording.peak_bytes <= budget_bytes
    assert plan_of(mlp, kept + 1, budget="min").planned.recording.peak_bytes > budget_bytes
    slower = 100 * (plan_of(mlp, least, budget=budget_bytes).planned.slowdown - 1)
    assert f"(there a step takes {slower:.1f} % longer than if everything could be kept)" in line


def test_a_search_that_ends_at_its_limit_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = largest_batch.LargestBatches(64, largest_batch.MOST, 1.0)
    monkeypatch.setattr(largest_batch, "largest_batches", lambda *one, **two: found)
    _, out, _ = ran(capsys, PERCEPTRON, "--batch", "4096", "--hardware", "titan-x", "--largest-batch", "--no-bound")
    assert f"  largest batch: 64 with everything kept, {largest_batch.MOST} or more with plans" in out


def test_a_batch_that_cannot_be_tried_leaves_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "up_to_eight.py").write_text(
        "import torch, vdnn\n"
        "def build(batch):\n"
        "    if batch > 8:\n"
        "        raise vdnn.VdnnError('more than the sampler has.')\n"
        "    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()), torch.randn(batch, 64)\n"
    )
    monkeypatch.chdir(tmp_path)
    wanted = ("up_to_eight.py:build", "--batch", "8", "--min-bytes", "64", "--largest-batch", "--no-bound")
    code, out, _ = ran(capsys, *wanted)
    assert code == 0
    assert "  largest batch: not found, at batch 16: more than the sampler has." in out.splitlines()


def _numbers(line: str) -> tuple[int, int]:
    words = line.replace(",", "").split()
    return int(words[2]), int(words[6])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nonsense", "--batch", "2"), 2, "expected MODULE:FUNCTION"),
        (("nowhere_at_all:f", "--batch", "2"), 2, "the module 'nowhere_at_all' cannot be imported"),
        (("benchmarks.models:nothing", "--batch", "2"), 2, "has no 'nothing'."),
        (("benchmarks.models:vgg61", "--batch", "2"), 2, "has no 'vgg61': did you mean 'vgg16'?"),
        (("no_such_file.py:f", "--batch", "2"), 2, "there is no file "),
        (("benchmarks.models.vgg:SIDE", "--batch", "2"), 2, "a function of a batch size, got an object of type int"),
        ((UNET, "--batch", "0"), 2, "--batch: expected a number, 1 or more, got 0"),
        ((UNET, "--batch", "4", "--hardware", "abacus"), 2, "hardware profile: expected one of"),
        ((UNET, "--batch", "4", "--policy", "best"), 2, "policy: expected one of"),
        ((UNET, "--batch", "4", "--budget", "plenty"), 2, "budget: expected a size"),
        ((UNET, "--batch", "4", "--budget", "1MiB"), 1, "cannot be met"),
        ((UNET, "--batch", "4", "--hardware", "measured"), 2, "needs a GPU that torch can use"),
    ],
)
def test_the_command_refuses(
    arguments: tuple[str, ...],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found, out, said = ran(capsys, *arguments)
    assert found == code
    assert out == ""
    assert said.startswith("vdnn plan: ")
    assert message in said


def test_a_profile_with_a_link_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(vdnn.__file__).parent / "hardware" / "profiles" / "titan-x.json"
    profile = json.loads(source.read_text())
    profile["figures"]["to_host_bytes_per_s"]["value"] = 0
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(profile))
    code, _, said = ran(capsys, UNET, "--batch", "4", "--hardware", str(path))
    assert code == 2
    assert "to_host_bytes_per_s" in said


@pytest.mark.parametrize("named", ["a_users_model:make", "deeper/the_file.py:make"])
def test_a_function_beside_the_caller_is_found(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "the_file.py").write_text("from beside_it import make\n")
    for path in tmp_path / "a_users_model.py", tmp_path / "deeper" / "beside_it.py":
        path.write_text(
            "import torch\n"
            "def make(batch):\n"
            "    return torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh()), torch.randn(batch, 512)\n"
        )
    monkeypatch.chdir(tmp_path)
    # The path of an installed program begins with the program's own folder, not with the current one.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    code, out, _ = ran(capsys, named, "--batch", "4096", "--hardware", "h200", "--optimizer", "sgd", "--no-bound")
    assert code == 0
    assert out.startswith(f"{named}, batch 4096, on h200")


def test_a_file_whose_name_is_taken_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "json.py").write_text("def make(batch): ...\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, _, said = ran(capsys, f"{tmp_path}/json.py:make", "--batch", "1")
    assert code == 2
    assert "a module named 'json' is imported already" in said


def test_measuring_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(VdnnError, match="needs a GPU"):
        measured_profile()
