"""Plans outlive their process in a plan folder: the next run of the same training follows them from its first step."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.rigs.networks import perceptron
from tests.runtime.rigs.stored_trainings import TRAININGS, Decoder, Training, plain, under_budget
from vdnn.errors import RecomputeError
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.recompute.proofs import Proofs, disabled_recipes
from vdnn.runtime.recompute.trial import Trial
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps import plan_store
from vdnn.runtime.steps.steps import StepWatch
from vdnn.step.stored_plans import read_file, read_header, write_file

ROOT = Path(__file__).parents[3]
BUDGET_BYTES = 1200 << 10
BATCHES = (320,) * 4


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All trainings, in one process and then in another one, with one plan folder."""
    folder = str(tmp_path_factory.mktemp("plans"))
    command = [sys.executable, "-m", "tests.runtime.rigs.stored_trainings", folder]
    ran = [subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True) for _ in range(2)]
    return [json.loads(one.stdout) for one in ran]


@pytest.mark.parametrize("name", TRAININGS)
def test_the_second_process_follows_plans_from_its_first_step(two_processes: list[dict[str, Any]], name: str) -> None:
    first, second = (one[name] for one in two_processes)
    assert first["vdnn"]["plans_made"] > 0, "the first process has made the plans"
    assert first["vdnn"]["recorded"] > 0
    assert second["vdnn"]["recorded"] == 0, "no step was recorded before the plan was followed"
    assert second["vdnn"]["made_in_first"] == second["vdnn"]["plans_made"] == 0, "the planner was not called"
    assert (
        f"steps: {len(TRAININGS[name].batches)} of {len(TRAININGS[name].batches)} followed a plan"
        in (second["vdnn"]["report"])
    )
    assert "follows stored plans of an earlier run: " in second["vdnn"]["report"]


@pytest.mark.parametrize("name", TRAININGS)
def test_the_budget_holds_from_the_first_step_of_the_second_process(
    two_processes: list[dict[str, Any]], name: str
) -> None:
    second = two_processes[1][name]
    over = [peak - second["budget_bytes"] for peak in second["vdnn"]["peaks"] if peak > second["budget_bytes"]]
    assert over == []


@pytest.mark.parametrize("name", TRAININGS)
def test_both_processes_have_the_losses_and_gradients_of_plain(two_processes: list[dict[str, Any]], name: str) -> None:
    for one in two_processes:
        assert one[name]["vdnn"]["numbers"] == one[name]["plain"]["numbers"]


def test_the_second_process_recomputes_what_the_plan_recomputes(two_processes: list[dict[str, Any]]) -> None:
    for name in TRAININGS:
        assert "  0 recomputes" not in two_processes[1][name]["vdnn"]["report"]


# In one process, without data.


class Ran(NamedTuple):
    """A run on a virtual machine."""

    session: Session
    peaks: list[int]
    report: str
    recorded: int
    made: int


def trained(
    folder: Path | str | None,
    batches: tuple[int, ...] = BATCHES,
    budget_bytes: int = BUDGET_BYTES,
    *,
    width: int = 64,
    make: Callable[[int], nn.Module] | None = None,
    loss_of: Callable[[nn.Module, int, int], torch.Tensor] | None = None,
    optimizer_of: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> Ran:
    peaks = []
    with VirtualMachine("titan-x") as machine:
        model = perceptron(width, 12) if make is None else make(width)
        optimizer = optimizer_of(model.parameters(), 0.1)
        session = vdnn.offload(budget=budget_bytes, device=machine, min_bytes=0, plans=folder, **options)
        with session:
            for step, batch in enumerate(batches):
                machine.reset_peak()
                if loss_of is None:
                    loss = model(torch.zeros(batch, width)).square().sum()
                else:
                    loss = loss_of(model, batch, step)
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()
                peaks.append(machine.peak_bytes)
        use = session._engine.steps.plan_use
        assert use is not None
        return Ran(session, peaks, session.report(), use.recorded, use.made)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.plans"))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The one file of a folder that a first run has written."""
    first = trained(tmp_path)
    assert first.recorded == 2
    (path,) = files(tmp_path)
    return path


def test_a_run_that_only_follows_stored_plans_writes_nothing(stored: Path) -> None:
    before = stored.read_bytes()
    again = trained(stored.parent)
    assert (again.recorded, again.made) == (0, 0)
    assert max(again.peaks) <= BUDGET_BYTES
    assert stored.read_bytes() == before


def test_a_run_without_a_folder_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert trained(None).recorded == 2
    assert list(tmp_path.iterdir()) == []


def test_the_log_says_that_stored_plans_are_followed(stored: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vdnn"):
        trained(stored.parent)
    assert f"vdnn: follows stored plans of an earlier run: {stored}" in caplog.messages


def with_version(path: Path, **versions: str) -> None:
    header, body = read_file(path)
    facts = {name: getattr(header, name) for name in ("vdnn_version", "torch_version", "facts", "structure", "digest")}
    write_file(path, type(header)(**{**facts, **versions}), body)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another torch": (lambda path: with_version(path, torch_version="1.0"), "of torch 1.0, and this is torch "),
    "another vdnn": (lambda path: with_version(path, vdnn_version="0.0"), "of vdnn 0.0, and this is vdnn "),
    "one bit": (flipped, "it was changed or cut off after it was written. Plans are made anew."),
    "half of it": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "it was changed or cut off"),
    "its first half alone": (lambda path: path.write_bytes(path.read_bytes()[:50]), "not JSON or was cut off"),
    "nothing": (lambda path: path.write_bytes(b""), "not JSON or was cut off"),
    "noise": (lambda path: path.write_bytes(bytes(range(256))), "expected"),
    "other JSON": (lambda path: path.write_bytes(b'{"form": "vdnn plan"}\n'), "got 'vdnn plan'"),
    "a format to come": (
        lambda path: path.write_bytes(path.read_bytes().replace(b'"version":2,', b'"version":3,', 1)),
        "expected version 2",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_stale_or_damaged_file_is_refused_in_one_sentence_and_replaced(
    stored: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, sentence = DAMAGES[name]
    damage(stored)
    ran = trained(stored.parent)
    refusals = [one for one in caplog.messages if "Plans are made anew" in one]
    assert len(refusals) == 1
    assert sentence in refusals[0]
    assert refusals[0].removeprefix("vdnn: ").rstrip(".") in ran.report
    assert ran.recorded == 2
    assert trained(stored.parent).recorded == 0, "the file was replaced"


def test_a_stored_plan_that_contradicts_itself_is_refused(stored: Path, caplog: pytest.LogCaptureFixture) -> None:
    header, body = read_file(stored)
    plans = plan_store.unpacked(stored, body)
    table = plans.tables[0]
    wrong = type(plans)(plans.recordings[:0], (table,), plans.order)
    packed = plan_store.packed(wrong)
    with_version(stored)
    write_file(
        stored,
        type(header)(
            header.vdnn_version, header.torch_version, header.facts, header.structure, plan_store.digest_of(packed)
        ),
        packed,
    )
    ran = trained(stored.parent)
    assert "cannot be followed" in caplog.text
    assert ran.recorded == 2
    assert trained(stored.parent).recorded == 0


NEIGHBOURS: dict[str, tuple[dict[str, Any], str]] = {
    "budget": ({"budget_bytes": 1300 << 10}, "budget (1228800 bytes, now 1331200 bytes)"),
    "model": ({"width": 48}, "the model: 0.weight (float32 [64, 64], now float32 [48, 48]) and "),
    "options": ({"recompute": False}, "recompute (True, now False)"),
    "policy": ({"policy": "auto-offload"}, "policy (auto "),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_another_training_gets_plans_of_its_own_and_is_told_the_difference(stored: Path, name: str) -> None:
    options, difference = NEIGHBOURS[name]
    ran = trained(stored.parent, **options)
    assert ran.recorded > 0
    assert f"no stored plans of this training in {stored.parent}: the nearest differ in {difference}" in ran.report
    assert len(files(stored.parent)) == 2
    assert trained(stored.parent, **options).recorded == 0
    assert trained(stored.parent).recorded == 0, "the plans of the first training are still there"


def test_a_step_of_a_size_that_no_run_had_is_planned_from_stored_steps(tmp_path: Path) -> None:
    trained(tmp_path, (320, 320, 160, 240, 320))
    ran = trained(tmp_path, (280, 200, 120, 300))
    assert ran.recorded == 0
    assert max(ran.peaks) <= BUDGET_BYTES
    assert "steps: 4 of 4 followed a plan" in ran.report


def two_kinds(model: nn.Module, batch: int, step: int) -> torch.Tensor:
    made = model(torch.zeros(batch, 64))
    return made.square().sum() if step % 2 else made.exp().sin().cos().square().sum()


def test_kinds_of_step_in_turn_follow_plans_of_their_own_from_the_first_step(tmp_path: Path) -> None:
    first = trained(tmp_path, (320,) * 10, loss_of=two_kinds)
    assert "for 2 kinds of step" in first.report
    ran = trained(tmp_path, (320,) * 6, loss_of=two_kinds)
    assert (ran.recorded, ran.made) == (0, 0)
    assert max(ran.peaks) <= BUDGET_BYTES
    assert "for 2 kinds of step" in ran.report


def test_two_models_have_a_file_each(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.models = nn.ModuleList((perceptron(64, 12), perceptron(64, 13)))

    def in_turn(model: nn.Module, batch: int, step: int) -> torch.Tensor:
        chosen: nn.Module = model.models[step % 2]  # type: ignore[index, assignment]
        return chosen(torch.zeros(batch, 64)).square().sum()  # type: ignore[no-any-return]

    trained(tmp_path, (320,) * 8, 1400 << 10, make=lambda _: Two(), loss_of=in_turn)
    assert len(files(tmp_path)) == 2
    ran = trained(tmp_path, (320,) * 4, 1400 << 10, make=lambda _: Two(), loss_of=in_turn)
    assert (ran.recorded, ran.made) == (0, 0)
    assert max(ran.peaks) <= 1400 << 10


def micro_batched(folder: Path, budget_bytes: int) -> Ran:
    peaks = []
    with VirtualMachine("titan-x") as machine:
        model = perceptron(64, 12)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with vdnn.offload(budget=budget_bytes, device=machine, min_bytes=0, plans=folder) as session:
            for _ in range(4):
                machine.reset_peak()
                for _ in range(3):
                    model(torch.zeros(320, 64)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                peaks.append(machine.peak_bytes)
        use = session._engine.steps.plan_use
        assert use is not None
        return Ran(session, peaks, session.report(), use.recorded, use.made)


def test_later_micro_batches_follow_their_stored_plans(tmp_path: Path) -> None:
    assert micro_batched(tmp_path, 1300 << 10).recorded > 0
    ran = micro_batched(tmp_path, 1300 << 10)
    assert (ran.recorded, ran.made) == (0, 0)
    assert max(ran.peaks) <= 1300 << 10


def test_more_resident_memory_than_in_the_earlier_run_is_planned_again(stored: Path) -> None:
    ran = trained(stored.parent, optimizer_of=torch.optim.Adam)
    assert ran.recorded == 0
    assert ran.made > 0
    assert max(ran.peaks) <= BUDGET_BYTES


class Switched(nn.Sequential):
    """A model whose forward may be another one, which its modules do not tell."""

    is_changed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = super().forward(x)
        return made.exp().sin().cos().tanh() if self.is_changed else made


def test_a_program_that_saves_other_things_gets_plans_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"make": lambda width: Switched(*perceptron(width, 12)), "batches": (640,) * 5}
    options["budget_bytes"] = 2 * BUDGET_BYTES
    assert trained(tmp_path, **options).recorded == 2
    caplog.clear()
    monkeypatch.setattr(Switched, "is_changed", True)
    ran = trained(tmp_path, **options)
    assert [one for one in caplog.messages if "the step differs from the plan" in one] != []
    assert ran.recorded > 0
    assert max(ran.peaks[2:]) <= 2 * BUDGET_BYTES
    assert trained(tmp_path, **options).recorded == 0, "the file has both kinds of step"


def test_an_interrupt_loses_no_plan(tmp_path: Path) -> None:
    def interrupted(model: nn.Module, batch: int, step: int) -> torch.Tensor:
        loss = model(torch.zeros(batch, 64)).square().sum()
        if step == 2:
            raise KeyboardInterrupt
        return loss  # type: ignore[no-any-return]

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, loss_of=interrupted)
    assert len(files(tmp_path)) == 1
    assert list(tmp_path.glob(".*")) == []
    assert trained(tmp_path).recorded == 0


def test_plans_are_written_while_the_session_is_open(tmp_path: Path) -> None:
    seen = []

    def counted(model: nn.Module, batch: int, step: int) -> torch.Tensor:
        seen.append(len(files(tmp_path)))
        return model(torch.zeros(batch, 64)).square().sum()  # type: ignore[no-any-return]

    trained(tmp_path, loss_of=counted)
    assert seen == [0, 0, 0, 1], "once a step went without a new plan"


def test_sessions_in_turn_store_and_follow_as_one(tmp_path: Path) -> None:
    def run() -> tuple[int, list[int]]:
        peaks = []
        with VirtualMachine("titan-x") as machine:
            model = perceptron(64, 12)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(4):
                machine.reset_peak()
                with vdnn.offload(budget=BUDGET_BYTES, device=machine, min_bytes=0, plans=tmp_path) as session:
                    model(torch.zeros(320, 64)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                peaks.append(machine.peak_bytes)
            use = session._engine.steps.plan_use
            assert use is not None
            return use.recorded, peaks

    assert run()[0] == 2
    recorded, peaks = run()
    assert recorded == 0
    assert max(peaks) <= BUDGET_BYTES


# The folder.


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    with pytest.warns(vdnn.VdnnWarning, match=r"plans: the folder .*taken' cannot be written .*No plan is stored\."):
        ran = trained(taken)
    assert ran.recorded == 2
    assert max(ran.peaks) <= BUDGET_BYTES


def test_a_folder_that_is_removed_during_the_training_costs_one_warning(tmp_path: Path) -> None:
    folder = tmp_path / "plans"

    def removing(model: nn.Module, batch: int, step: int) -> torch.Tensor:
        if step == 0:
            folder.rmdir()
        return model(torch.zeros(batch, 64)).square().sum()  # type: ignore[no-any-return]

    with pytest.warns(vdnn.VdnnWarning, match="cannot be written any more") as warned:
        ran = trained(folder, (320, 320, 320, 640, 640, 640), 2400 << 10, loss_of=removing)
    assert len(warned) == 1
    assert max(ran.peaks) <= 2400 << 10


def test_writers_at_one_time_leave_a_whole_file(stored: Path) -> None:
    header, body = read_file(stored)
    problems: list[Exception] = []

    def write() -> None:
        for _ in range(50):
            write_file(stored, header, body)

    def read() -> None:
        try:
            for _ in range(100):
                read_file(stored)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=one) for one in (write, write, write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert read_file(stored) == (header, body)
    assert list(stored.parent.glob(".*")) == []


def test_ranks_that_store_at_one_time_leave_plans_that_are_followed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.runtime.rigs.stored_trainings", str(tmp_path), "gpt-2"]
    ranks = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert all(json.loads(one.communicate()[0]) for one in ranks)
    training = TRAININGS["gpt-2"]
    budget_bytes = int(training.share * max(plain(training).peaks))
    assert under_budget(training, budget_bytes, tmp_path).recorded == 0


def test_the_folder_is_bounded(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_store, "_MOST_FILES", 3)
    for more in range(1, 6):
        trained(stored.parent, budget_bytes=BUDGET_BYTES + (more << 16))
        trained(stored.parent)  # uses the first one again
    assert len(files(stored.parent)) == 3
    assert stored in files(stored.parent), "the files used least recently are removed"


def test_the_folder_is_bounded_in_bytes_and_keeps_the_latest_file(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_store, "_MOST_BYTES", 1)
    trained(stored.parent, budget_bytes=1300 << 10)
    (left,) = files(stored.parent)
    assert left != stored


def test_a_file_that_an_interrupted_process_left_is_removed_in_time(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = stored.parent / f".{stored.name}.1234abcd.part"
    left.write_bytes(b"half")
    trained(stored.parent, budget_bytes=1300 << 10)
    assert left.exists(), "another process may be writing it"
    monkeypatch.setattr(plan_store, "_OLD_PARTIAL_S", -1)
    trained(stored.parent, budget_bytes=1400 << 10)
    assert not left.exists()


def test_the_file_has_no_numbers_of_the_process(stored: Path) -> None:
    header = read_header(stored)
    assert {one.name for one in header.facts} >= {"card", "budget", "policy", "recompute", "min_bytes"}
    assert header.structure[1] == "0: Linear"


# Recomputes.

LLAMA = TRAININGS["llama"]


@pytest.fixture(scope="module")
def llama_budget_bytes() -> int:
    return int(LLAMA.share * max(plain(LLAMA).peaks))


@pytest.fixture
def no_disabled_recipes() -> Iterator[None]:
    before = set(disabled_recipes)
    yield
    disabled_recipes.clear()
    disabled_recipes.update(before)


class WritesBehind(Decoder):
    """Writes to what the last block has saved, between its forward and its backward, and behind autograd.
    Neither its modules nor what it saves tell it from the model that stored the plans."""

    __qualname__ = "Decoder"

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        held: list[torch.Tensor] = []
        up: nn.Module = self.blocks[2].up  # type: ignore[assignment]
        handle = up.register_forward_hook(lambda module, args, output: held.append(args[0]))
        logits = super().forward(words)
        handle.remove()
        held[0].data.mul_(1.5)
        return logits


WritesBehind.__name__ = "Decoder"


def test_a_stored_recipe_that_is_wrong_now_raises_before_the_optimizer_and_is_not_followed_again(
    tmp_path: Path, llama_budget_bytes: int, no_disabled_recipes: None
) -> None:
    assert under_budget(LLAMA, llama_budget_bytes, tmp_path).recorded == 2
    (path,) = files(tmp_path)
    changed = Training(lambda: WritesBehind(is_llama=True), LLAMA.batches, LLAMA.share)
    with pytest.raises(RecomputeError):
        under_budget(changed, llama_budget_bytes, tmp_path)
    assert not path.exists()
    disabled_recipes.clear()  # as in a new process
    assert under_budget(LLAMA, llama_budget_bytes, tmp_path).recorded == 2


def test_without_room_for_a_trial_a_recheck_proves_a_stored_recipe(
    tmp_path: Path, llama_budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_budget(LLAMA, llama_budget_bytes, tmp_path)
    trials = []
    monkeypatch.setattr(StepWatch, "make_room_for_trial", lambda self, transport, nbytes: False)
    monkeypatch.setattr(Proofs, "_try", lambda self, *args, **named: trials.append(args))
    ran = under_budget(LLAMA, llama_budget_bytes, tmp_path)
    assert trials == []
    assert "  0 recomputes" not in ran.report
    assert ", 0 differ" in ran.report
    assert ran.recorded == 0
    assert max(ran.peaks) <= llama_budget_bytes
    assert ran.numbers == plain(LLAMA).numbers


def test_no_trial_of_a_stored_recipe_recomputes_its_operands(
    tmp_path: Path, llama_budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_budget(LLAMA, llama_budget_bytes, tmp_path)
    were_discarded = []
    run = Trial.run

    def noted(self: Trial) -> torch.Tensor:
        were_discarded.append([one.managed.is_yet_to_be_recomputed for one in self._recipe.operands])
        return run(self)

    monkeypatch.setattr(Trial, "run", noted)
    ran = under_budget(LLAMA, llama_budget_bytes, tmp_path)
    assert were_discarded != []
    assert not any(map(any, were_discarded))
    assert ran.numbers == plain(LLAMA).numbers


@pytest.mark.parametrize("options", [{"recheck": 0}, {"tolerance": 1e-6}])
def test_stored_recomputes_are_followed_only_where_rechecks_prove_them(
    tmp_path: Path, llama_budget_bytes: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    under_budget(LLAMA, llama_budget_bytes, tmp_path, **options)
    ran = under_budget(LLAMA, llama_budget_bytes, tmp_path, **options)
    assert "nothing would prove that at its first use. Plans are made anew." in caplog.text
    assert ran.recorded == 2
    assert ran.numbers == plain(LLAMA).numbers


def test_integrity_proves_them_too(tmp_path: Path, llama_budget_bytes: int) -> None:
    under_budget(LLAMA, llama_budget_bytes, tmp_path, recheck=0, integrity=True)
    ran = under_budget(LLAMA, llama_budget_bytes, tmp_path, recheck=0, integrity=True)
    assert ran.recorded == 0
    assert ran.numbers == plain(LLAMA).numbers


# Arguments.


@pytest.mark.parametrize(
    ("plans", "error", "message"),
    [
        (3, TypeError, r"plans: expected the path of a folder, got int\."),
        ("", ValueError, r"plans: expected the path of a folder, got an empty text\."),
    ],
)
def test_what_is_no_path_is_refused(plans: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        vdnn.offload(budget="1GiB", plans=plans)


def test_a_session_that_makes_no_plans_stores_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"plans: this session makes no plans that could be stored\. Give a budget"):
        vdnn.offload("vdnn-all", device="sim", plans=tmp_path)


def test_a_plan_of_the_user_is_not_stored(stored: Path) -> None:
    plan = trained(None).session.plan
    assert plan is not None
    with pytest.raises(ValueError, match=r"Give a budget instead of plan=\."):
        vdnn.offload(plan=plan, plans=stored.parent)
