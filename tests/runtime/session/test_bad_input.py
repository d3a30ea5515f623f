"""Mistakes of users. Each is refused in a sentence that names the argument, what was expected and what came.

Inputs that are passed through instead of refused (meta tensors, devices that a session does not manage) are tested here
too, with the counter that reports them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.conftest import OpenSession
from tests.runtime.rigs.networks import perceptron
from tests.runtime.rigs.side_by_side import assert_same_as_plain
from tests.runtime.rigs.virtual_training import train
from vdnn import Plan, Recording, Timeline, VirtualMachine
from vdnn.errors import FormatError, VdnnError
from vdnn.planning.catalogue import policy_names
from vdnn.planning.policies.vdnn_all import VdnnAll
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.counters import Kept

A_PLAN = Plan("by hand", "cpu", "titan-x", None, (), ())
TITAN_X = VirtualMachine("titan-x")
A_SIZE = 'expected a size such as "12GiB", "1.5 GB" or an int of bytes'
CLOCK = "budgets and measure=True need a clock and a count of memory, which tensors on the CPU do not have. Use a GPU"
DEVICES = "device: expected 'cuda', 'sim', a VirtualMachine or a device of the native core"
POLICIES = "policy: expected one of " + ", ".join(map(repr, policy_names()))

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"policy": "everything"}, ValueError, f"{POLICIES}, got 'everything'."),
    ({"policy": 3}, TypeError, f"{POLICIES} or a policy, got int."),
    ({"policy": VdnnAll}, TypeError, f"{POLICIES} or a policy, got ABCMeta."),
    ({"policy": None}, TypeError, f"{POLICIES} or a policy, got NoneType."),
    ({"device": "tpu"}, ValueError, f"{DEVICES}, got 'tpu'."),
    ({"device": "cuda:0"}, ValueError, f"{DEVICES}, got 'cuda:0'."),
    ({"device": torch.device("cuda")}, TypeError, f"{DEVICES}, got device."),
    ({"device": 0}, TypeError, f"{DEVICES}, got int."),
    ({"budget": "plenty"}, ValueError, f"budget: {A_SIZE}, got 'plenty'."),
    ({"budget": "12G"}, ValueError, "budget: .* write GiB (powers of 1024) or GB (powers of 1000)."),
    ({"budget": 1.5}, TypeError, f"budget: {A_SIZE}, got the float 1.5. Write it as an int"),
    ({"budget": True}, TypeError, f"budget: {A_SIZE}, got the bool True."),
    ({"budget": []}, TypeError, f"budget: {A_SIZE}, got list []."),
    ({"budget": -1}, ValueError, "budget: expected a size of at least 1 byte, got -1."),
    ({"budget": "-12GiB"}, ValueError, "budget: expected a size above zero, got '-12GiB'."),
    ({"budget": 0}, ValueError, "budget: expected a size of at least 1 byte, got 0."),
    ({"budget": "0GiB"}, ValueError, "budget: expected a size of at least 1 byte, got '0GiB'."),
    ({"budget": "13GiB", "device": TITAN_X}, ValueError, "budget: 13.00 GiB is more than the device has, 12.00 GiB."),
    ({"budget": "1GiB", "plan": A_PLAN}, ValueError, "budget: a plan has a budget of its own. Give one of the two."),
    ({"policy": A_PLAN}, TypeError, "policy: expected a name or a policy, got a Plan: give it as plan=."),
    ({"plan": "plan.json"}, TypeError, "plan: expected a Plan, got str; Plan.load reads one from a file."),
    ({"policy": "keep", "plan": A_PLAN}, ValueError, "policy: a plan is followed as it is. Give one of the two."),
    ({"budget": "1GiB", "device": "sim"}, ValueError, CLOCK),
    ({"measure": True, "device": "sim"}, ValueError, CLOCK),
    ({"min_bytes": "small"}, ValueError, f"min_bytes: {A_SIZE}, got 'small'."),
    ({"min_bytes": ""}, ValueError, f"min_bytes: {A_SIZE}, got ''."),
    ({"min_bytes": -4096}, ValueError, "min_bytes: expected a size of at least 1 byte, got -4096."),
    ({"min_bytes": False}, TypeError, f"min_bytes: {A_SIZE}, got the bool False."),
    ({"min_bytes": None}, TypeError, f"min_bytes: {A_SIZE}, got NoneType None."),
    ({"limits": "64GiB"}, TypeError, "limits: expected a vdnn.Limits, got str."),
    ({"limits": None}, TypeError, "limits: expected a vdnn.Limits, got NoneType."),
    (
        {"integrity": True, "device": TITAN_X},
        ValueError,
        "integrity: tensors without data cannot be compared. Make the VirtualMachine with fake=False.",
    ),
    ({"warmup_steps": -1}, ValueError, "warmup_steps: expected a number of steps, 0 or more, got -1."),
    ({"warmup_steps": 1.5}, ValueError, "warmup_steps: expected a number of steps, 0 or more, got 1.5."),
    ({"warmup_steps": "one"}, ValueError, "warmup_steps: expected a number of steps, 0 or more, got 'one'."),
    ({"warmup_steps": None}, ValueError, "warmup_steps: expected a number of steps, 0 or more, got None."),
]

REFUSED_LIMITS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"host_budget": "64 gigs"}, ValueError, f"host_budget: {A_SIZE}, got '64 gigs'"),
    ({"host_budget": 0}, ValueError, "host_budget: expected a size of at least 1 byte, got 0."),
    ({"host_budget": 2.0}, TypeError, f"host_budget: {A_SIZE}, got the float 2.0."),
    ({"offload_window": "wide"}, ValueError, f"offload_window: {A_SIZE}, got 'wide'."),
    ({"offload_window": 0}, ValueError, "offload_window: expected a size of at least 1 byte, got 0."),
    ({"reload_window": "1" * 30}, ValueError, "reload_window: expected a size of at most "),
    ({"reload_window": []}, TypeError, f"reload_window: {A_SIZE}, got list []."),
]


def _name(options: dict[str, Any]) -> str:
    """A test id that is the same in every process: devices and plans are named by their class."""
    plain = (str, int, float)
    shown = (f"{name}={given if isinstance(given, plain) else type(given).__name__}" for name, given in options.items())
    return " ".join(shown)


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED, ids=[_name(one[0]) for one in REFUSED])
def test_offload_refuses(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    beginning, *rest = message.split(".* ")
    with pytest.raises(kind) as refused:
        vdnn.offload(**options)
    assert str(refused.value).startswith(beginning)
    assert all(part in str(refused.value) for part in rest)


@pytest.mark.parametrize(("limits", "kind", "message"), REFUSED_LIMITS, ids=[_name(one[0]) for one in REFUSED_LIMITS])
def test_limits_refuse_what_is_not_a_size(limits: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as refused:
        vdnn.Limits(**limits)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("thing", [[], "model", None, nn.Linear], ids=repr)
def test_keep_refuses_what_is_neither_tensor_nor_module(thing: object) -> None:
    with pytest.raises(TypeError, match=f"keep: expected a tensor or a module, got {type(thing).__name__}."):
        vdnn.keep(thing)  # type: ignore[arg-type]


def test_entering_while_a_cuda_graph_is_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    session = vdnn.offload(device="sim")
    with pytest.raises(VdnnError, match="cannot be entered while a CUDA graph is being captured"):
        session.__enter__()
    capturing[0] = False
    with session:
        pass


def test_a_cuda_graph_captured_inside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves that would move are refused. Saves that are kept may be captured, and the step after the capture works."""
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    message = r"captured inside vdnn.offload.*: capture outside of the session, or under vdnn.paused\(\)"
    x = torch.rand(64, requires_grad=True)
    with vdnn.offload("vdnn-all", device="sim", min_bytes=0) as session:
        loss = x.sin().cos().sum()
        capturing[0] = True
        with pytest.raises(VdnnError, match=message):
            x.sin().cos()
        with pytest.raises(VdnnError, match=message):
            loss.backward()
        with vdnn.paused():
            kept = x.sin().cos().sum()
            kept.backward()
        capturing[0] = False
        loss = x.sin().cos().sum()
        loss.backward()
    assert session.counters.storages == 2
    session.close()


class TestAllocatorsWithoutACountOfMemory:
    """A pluggable allocator raises if it is asked for statistics, and cudaMallocAsync reports no requested bytes."""

    @pytest.fixture(autouse=True, params=["pluggable", "cudaMallocAsync"])
    def name(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        def statistics(*_: object) -> Any:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: request.param)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", statistics)
        return str(request.param)

    @pytest.mark.parametrize("options", [{"budget": "1GiB"}, {"measure": True}, {"policy": "auto-offload"}], ids=str)
    @pytest.mark.parametrize("device", [None, "cuda"])
    def test_budgets_and_measurements_are_refused(self, name: str, device: Any, options: dict[str, Any]) -> None:
        message = f"need a count of requested bytes, which torch's allocator '{name}' does not have. Use torch's native"
        with pytest.raises(ValueError, match=message):
            vdnn.offload(device=device, **options)

    def test_without_a_budget_everything_is_offloaded_with_a_warning(self, name: str) -> None:
        with pytest.warns(vdnn.VdnnWarning, match=f"torch's allocator '{name}' does not count requested bytes"):
            session = vdnn.offload()
        assert session.report().startswith("policy vdnn-all")
        session.close()

    def test_policies_that_plan_nothing_need_no_count(self) -> None:
        vdnn.offload("vdnn-all").close()
        vdnn.offload("keep").close()


def test_torchs_native_allocator_has_a_count_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    vdnn.offload("auto", measure=True).close()


def test_a_virtual_machine_is_entered_once() -> None:
    with VirtualMachine("titan-x") as machine:
        with pytest.raises(VdnnError, match="this virtual machine is already entered: make another one."), machine:
            pass
        assert torch.ones(3).sum().shape == ()
    with machine:  # a machine that was left may be entered again
        pass


# Inputs that are passed through.


def test_meta_tensors_pass_through_and_are_counted(session: Session) -> None:
    model, x = perceptron().to("meta"), torch.randn(4, 16, device="meta")
    with session:
        model(x).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.shape == weight.shape for weight in model.parameters())
    assert session.counters.kept[Kept.OTHER_DEVICE] > 0
    assert session.counters.storages == 0
    assert "on a device that this session does not manage" in session.report()


def test_of_a_model_on_two_devices_the_part_that_can_be_moved_is(open_session: OpenSession) -> None:
    session, here, there, x = open_session(), perceptron(), perceptron().to("meta"), torch.randn(4, 16)

    def step() -> torch.Tensor:
        loss: torch.Tensor = here(x).square().sum()
        away = there(x.to("meta")).square().sum()
        away.backward()
        loss.backward()
        return loss

    assert_same_as_plain(session, step, here)
    assert session.counters.kept[Kept.OTHER_DEVICE] > 0
    assert all(weight.grad is not None for weight in there.parameters())


# Files.


def values() -> dict[str, Any]:
    """A plan, a recording and a timeline of a real step, by the name of their kind."""
    with VirtualMachine("titan-x") as machine:
        session, _ = train(machine, "perceptron", budget="64MiB")
    return {"plan": session.plan, "recording": session.recording, "timeline": session.timeline}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("values")
    for name, value in values().items():
        value.save(folder / name)
    return {name: folder / name for name in LOADERS}


LOADERS: dict[str, Callable[[Path], Any]] = {"plan": Plan.load, "recording": Recording.load, "timeline": Timeline.load}


def with_field(text: str, name: str, value: object) -> str:
    return json.dumps({**json.loads(text), name: value})


def without_field(text: str, name: str) -> str:
    return json.dumps({key: value for key, value in json.loads(text).items() if key != name})


SPOILED: dict[str, tuple[Callable[[str], str], str]] = {
    "cut off": (lambda text: text[: len(text) // 2], "expected JSON, got text that is not JSON or was cut off: "),
    "empty": (lambda text: "", "expected JSON, got text that is not JSON or was cut off: "),
    "no JSON": (lambda text: "vdnn " + text, "expected JSON, got text that is not JSON or was cut off: "),
    "a list": (lambda text: f"[{text}]", "got 'list'."),
    "another form": (lambda text: with_field(text, "form", "vdnn diary"), "got 'vdnn diary'."),
    "no form": (lambda text: without_field(text, "form"), "got None."),
    "another version": (
        lambda text: with_field(text, "version", 99),
        "got version 99: create the file again with this vdnn.",
    ),
    "a field too many": (lambda text: with_field(text, "mood", 1), "missing nothing, unknown ['mood']."),
    "no version": (lambda text: without_field(text, "version"), "got version None"),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("how", SPOILED)
def test_a_spoiled_file_is_refused_by_name(saved: dict[str, Path], tmp_path: Path, kind: str, how: str) -> None:
    spoil, complaint = SPOILED[how]
    path = tmp_path / "spoiled.json"
    path.write_text(spoil(saved[kind].read_text()))
    with pytest.raises(FormatError) as refused:
        LOADERS[kind](path)
    assert str(refused.value).startswith(f"{path}: vdnn {kind}: ")
    assert complaint in str(refused.value)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_file_of_another_kind_is_refused(saved: dict[str, Path], kind: str) -> None:
    for other in LOADERS.keys() - {kind}:
        with pytest.raises(FormatError, match=f"expected a JSON object with form 'vdnn {kind}', got 'vdnn {other}'."):
            LOADERS[kind](saved[other])


@pytest.mark.parametrize("kind", LOADERS)
def test_a_file_that_is_no_text_or_not_there_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(FormatError, match=f"picture: vdnn {kind}: expected text in UTF-8, got other bytes."):
        LOADERS[kind](tmp_path / "picture")
    with pytest.raises(FileNotFoundError, match="nowhere.json"):
        LOADERS[kind](tmp_path / "nowhere.json")


def test_a_field_of_the_wrong_type_is_named(saved: dict[str, Path], tmp_path: Path) -> None:
    found = json.loads(saved["recording"].read_text())
    found["points"][1]["compute_ns"] = "long"
    (tmp_path / "step").write_text(json.dumps(found))
    with pytest.raises(FormatError, match="points.1..compute_ns: expected int, got 'long'."):
        Recording.load(tmp_path / "step")


def test_a_plan_that_contradicts_itself_is_refused_with_its_file(saved: dict[str, Path], tmp_path: Path) -> None:
    found = json.loads(saved["plan"].read_text())
    found["lifetimes"][0].update(action="keep", absences=[{"release_point": 1, "reload_point": 2}])
    (tmp_path / "plan").write_text(json.dumps(found))
    with pytest.raises(
        FormatError, match="plan: plan: expected .*, got lifetime 0 to keep with absences .*release_point=1"
    ):
        Plan.load(tmp_path / "plan")


@pytest.mark.parametrize("fails", ["write_bytes", "replace"])
def test_saving_that_fails_leaves_what_was_there(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(saved["plan"].read_text())
    plan = Plan.load(path)
    write_bytes = Path.write_bytes

    def refuse(self: Path, given: Any, **options: Any) -> int:
        if fails == "write_bytes":
            write_bytes(self, given[: len(given) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, fails, refuse)
        with pytest.raises(OSError, match="No space left on device"):
            plan.save(path)
        with pytest.raises(OSError, match="No space left on device"):
            plan.save(tmp_path / "new.json")
    assert Plan.load(path) == plan
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("budget", [1, 7])
def test_a_budget_of_a_few_bytes_is_refused_with_the_least_that_is_met(budget: int) -> None:
    """Meant as gibibytes, perhaps."""

    def trained() -> None:
        with VirtualMachine("titan-x", fake=False) as machine, vdnn.offload(budget=budget, device=machine, min_bytes=0):
            model = perceptron()
            for _ in range(2):
                model(torch.randn(4, 16)).sum().backward()

    with pytest.raises(vdnn.BudgetError, match=f"budget {budget} B cannot be met: .* are needed"):
        trained()
