"""Training state stays on the device as far as that shortens the step, and leaves when a step needs the room."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.training_state.conftest import Manage, on_host
from tests.runtime.training_state.ways import what_stays_changes
from vdnn.runtime.session.session import Session
from vdnn.runtime.training_state.parameters.away_parameter import AwayParameter, away_of
from vdnn.runtime.training_state.state_room import StateKind, StateRoom

pytestmark = pytest.mark.filterwarnings("ignore::vdnn.user_warnings.VdnnWarning")
WIDTH, DEPTH = 512, 8
STATE_BYTES = 2 * DEPTH * 4 * WIDTH * WIDTH


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)])


class Training:
    """A small training on a virtual machine, and what each of its steps took."""

    def __init__(self, machine: vdnn.VirtualMachine, rows: int = 2048) -> None:
        self.machine, self.rows = machine, rows
        self.model = layers()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.peaks: list[int] = []
        self.times: list[int] = []

    def step(self, rows: int | None = None) -> None:
        self.machine.reset_peak()
        began = self.machine.now_ns
        self.model(torch.ones(rows or self.rows, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times.append(self.machine.now_ns - began)
        self.peaks.append(self.machine.peak_bytes)


def kept_peak(rows: int = 2048) -> int:
    with vdnn.VirtualMachine("rtx-4090") as machine:
        training = Training(machine, rows)
        for _ in range(3):
            training.step()
    return training.peaks[-1]


def session_for(training: Training, budget: int, **options: Any) -> Session:
    limits = vdnn.Limits(offload_window="4MiB", reload_window="4MiB")
    options = {"min_bytes": "64KiB", "limits": limits, "optimizer": training.optimizer, **options}
    return vdnn.offload(budget=budget, device=training.machine, **options)


def managed(budget: int, steps: int = 10, **options: Any) -> tuple[Training, Session]:
    with vdnn.VirtualMachine("rtx-4090") as machine:
        training = Training(machine)
        with session_for(training, budget, **options) as session:
            for _ in range(steps):
                training.step()
                session.step()
    return training, session


def managed_whole(budget: int, **options: Any) -> tuple[Training, Session]:
    """Parameters, gradients and state leave."""
    with vdnn.VirtualMachine("rtx-4090") as machine:
        training = Training(machine)
        with session_for(training, budget, model=training.model, parameters="all", **options) as session:
            for _ in range(12):
                training.step()
                session.step()
    return training, session


def away_parameters_of(model: nn.Module) -> list[AwayParameter]:
    return [away for one in model.parameters() if (away := away_of(one)) is not None]


def away_parameters(training: Training) -> list[AwayParameter]:
    return away_parameters_of(training.model)


def layers_with_data() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])


def never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateRoom, "stepped", lambda *_: None)


@pytest.mark.parametrize("share", [0.95, 0.85, 0.7, 0.55])
def test_a_step_is_shorter_than_with_all_state_away_and_within_the_budget(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = int(share * kept_peak())
    training, session = managed(budget)
    never(monkeypatch)
    away, _ = managed(budget)
    assert training.times[-1] < 0.97 * away.times[-1]
    assert max(training.peaks) <= budget
    assert max(away.peaks) <= budget
    assert on_host(training.optimizer) < STATE_BYTES
    assert "of the optimizers' state stay on the device" in session.report()


@pytest.mark.parametrize(("share", "at_most"), [(0.9, 0.8), (0.6, 0.8), (0.45, 0.92)])
def test_parameters_and_gradients_stay_too_where_the_budget_has_room(
    share: float, at_most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = int(share * kept_peak())
    training, session = managed_whole(budget)
    never(monkeypatch)
    away, _ = managed_whole(budget)
    assert training.times[-1] < at_most * away.times[-1]
    assert max(training.peaks) <= budget
    assert any("MiB of parameters" in line for line in session._engine.state_room.lines)


def test_with_everything_managed_a_step_takes_hardly_longer_than_with_the_state_alone() -> None:
    budget = int(0.7 * kept_peak())
    assert managed_whole(budget)[0].times[-1] <= 1.06 * managed(budget)[0].times[-1]


def test_a_step_that_needs_the_room_of_parameters_gets_it() -> None:
    budget = int(0.25 * kept_peak(4096))
    with vdnn.VirtualMachine("rtx-4090") as machine:
        training = Training(machine)
        with session_for(training, budget, model=training.model, parameters="all") as session:
            room = session._engine.state_room
            for _ in range(8):
                training.step()
                session.step()
            assert room.staying[StateKind.PARAMETERS]
            training.step(4096)
            assert not any(one.stays for one in away_parameters(training))
            assert "leaves the device again" in session.report()
            session.step()
            for rows in (4096,) * 6 + (2048,) * 3:
                training.step(rows)
                session.step()
    assert max(training.peaks) <= budget


def test_with_a_plan_folder_parameters_and_gradients_leave_as_the_next_run_begins(tmp_path: Path) -> None:
    """Its plans are of steps from which they leave."""
    budget = int(0.7 * kept_peak())
    training, session = managed_whole(budget, plans=tmp_path)
    staying = session._engine.state_room.staying
    assert not staying[StateKind.PARAMETERS]
    assert not staying[StateKind.GRADIENTS]
    assert max(training.peaks) <= budget


@pytest.mark.parametrize("optimizer", [None, "given"])
def test_frozen_weights_stay_where_the_budget_has_room(optimizer: str | None) -> None:
    with vdnn.VirtualMachine("rtx-4090") as machine:
        training = Training(machine)
        for one in training.model[:-1].parameters():
            one.requires_grad_(False)
        training.optimizer = torch.optim.AdamW(training.model[-1].parameters())
        given = {"model": training.model, "parameters": "frozen"}
        given |= {} if optimizer else {"optimizer": None}
        with session_for(training, int(0.6 * kept_peak()), **given) as session:
            for _ in range(8):
                training.step()
                session.step()
    assert training.times[-1] < 0.8 * training.times[2]
    assert "MiB of parameters" in session.report()


def test_parameters_stay_in_the_next_session_too() -> None:
    budget = int(0.7 * kept_peak())
    with vdnn.VirtualMachine("rtx-4090") as machine:
        training = Training(machine)
        session = session_for(training, budget, model=training.model, parameters="all")
        for _ in range(3):
            with session:
                for _ in range(6):
                    training.step()
                    session.step()
                stay = [one.stays for one in away_parameters(training)]
            assert all(stay)
    assert max(training.peaks) <= budget
    assert training.times[-1] == training.times[4]


def test_memory_of_the_host_that_the_program_holds_keeps_its_parameter_away(manage: Manage) -> None:
    """It sees each step, as a state_dict of plain PyTorch does."""
    model = layers_with_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with what_stays_changes() as found, manage(optimizer, model=model, parameters="all"):
        saved = None
        for number in range(9):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 4:
                for one in away_parameters_of(model):
                    one.manager.take_out()  # type: ignore[attr-defined]
                saved = model.state_dict()
            if saved is not None:
                assert all(torch.equal(one, saved[name]) for name, one in model.named_parameters())
    assert any(found[:5])
    assert not any(found[5:])


@pytest.mark.parametrize("when", ["never", "behind the step", "behind backward"])
def test_a_parameter_that_the_program_reads_between_calls_is_found_on_the_host_in_all_steps(
    when: str, manage: Manage
) -> None:
    """An average that it makes there goes on there."""
    model = layers_with_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with what_stays_changes() as found, manage(optimizer, model=model, parameters="all"):
        for _ in range(9):
            model(torch.ones(4, 8)).square().mean().backward()
            with torch.no_grad():
                if when == "behind backward":
                    torch._foreach_norm(list(model.parameters()))
            optimizer.step()
            with torch.no_grad():
                if when == "behind the step":
                    model[0].weight.clone()
            optimizer.zero_grad()
            assert not away_parameters_of(model)[0].stays or when == "never"
    assert any(found) == (when != "behind backward")


def test_what_is_written_while_it_stays_is_kept_when_it_leaves(manage: Manage) -> None:
    model = layers_with_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with manage(optimizer, model=model, parameters="all"):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        away = away_parameters_of(model)
        manager: Any = away[0].manager
        manager.keep({id(one.parameter) for one in away})
        assert all(one.stays and one.is_in_place for one in away)
        with torch.no_grad():
            model[0].weight.fill_(2.0)
        model[1].weight.data.fill_(3.0)
        optimizer.step()
        expected = [one.detach().clone() for one in model.parameters()]
        manager.take_out()
        assert not any(one.is_in_place for one in away)
        assert all(map(torch.equal, expected, model.parameters()))
    assert all(map(torch.equal, expected, model.parameters()))


def test_the_device_gets_the_room_of_what_stays_before_it_refuses_a_copy(
    manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers_with_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with manage(optimizer, model=model, parameters="all"):
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        first, *others = away_parameters_of(model)
        manager: Any = first.manager
        manager.keep({id(one.parameter) for one in others})
        fetched = AwayParameter.fetched

        def refused_once(away: AwayParameter) -> Any:
            monkeypatch.setattr(AwayParameter, "fetched", fetched)
            raise torch.OutOfMemoryError

        monkeypatch.setattr(AwayParameter, "fetched", refused_once)
        model(torch.ones(4, 8)).sum().backward()
        assert not any(one.stays for one in others)


def test_the_step_takes_the_predicted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted: list[float] = []
    whole = StateRoom._decide

    def decide(room: StateRoom, states: Any, parameters: Any, before: Any, now: Any, steps: Any) -> None:
        away = [one for state in states for one in state.bytes_away()]
        whole(room, states, parameters, before, now, steps)
        kept = sum(nbytes for identity, nbytes in away if identity in room.staying[StateKind.STATE])
        found = steps.predicted_ns(kept)
        predicted.append(found - 2 * kept * (now[1] - before[1]) / (now[0] - before[0]))

    monkeypatch.setattr(StateRoom, "_decide", decide)
    training, _ = managed(int(0.7 * kept_peak()))
    assert len(predicted) == 1
    assert training.times[-1] == pytest.approx(predicted[0], rel=0.05)


def test_the_predicted_peak_has_the_state_that_stays_without_a_new_plan() -> None:
    """An activation of 256 rows takes 1 MiB, and a gradient 4: a plan that moves nothing has room for some of the
    state, and goes on to be followed with it."""
    with vdnn.VirtualMachine("rtx-4090") as machine:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(DEPTH)])
        optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(256, 1024)
        with vdnn.offload(budget="112MiB", device=machine, model=model, optimizer=optimizer) as session:
            for _ in range(8):
                machine.reset_peak()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            predicted = session._engine.steps.predicted()
        assert 0 < on_host(optimizer) < 2 * DEPTH * 4 * 1024 * 1024
    assert predicted is not None
    assert machine.peak_bytes == predicted[1].peak_bytes


def test_where_nothing_is_gained_all_state_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the least budget there is no room."""
    never(monkeypatch)
    least = max(managed("min")[0].peaks[2:])  # type: ignore[arg-type]
    monkeypatch.undo()
    training, session = managed(least + (64 << 10))
    assert on_host(training.optimizer) == STATE_BYTES
    assert "stay on the device: a step" not in session.report()


@pytest.mark.parametrize(("share", "leaves"), [(0.6, False), (0.3, True)])
def test_a_step_that_needs_the_room_gets_it(share: float, leaves: bool) -> None:
    """Steps of twice the size come, with or without room for the state. They keep to the budget."""
    budget = int(share * kept_peak(4096))
    with vdnn.VirtualMachine("rtx-4090") as machine:
        training = Training(machine)
        with session_for(training, budget) as session:
            for _ in range(8):
                training.step()
                session.step()
            assert on_host(training.optimizer) == 0
            for _ in range(4):
                training.step(4096)
                session.step()
            assert on_host(training.optimizer) == (STATE_BYTES if leaves else 0)
    assert max(training.peaks) <= budget
    assert ("leaves the device again" in session.report()) == leaves


def test_plans_get_the_room_back_that_the_state_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps after a large one are as fast as in a session whose state has never stayed."""
    budget = int(0.3 * kept_peak(4096))

    def last_ns() -> int:
        with vdnn.VirtualMachine("rtx-4090") as machine:
            training = Training(machine)
            with session_for(training, budget) as session:
                for rows in (2048,) * 8 + (4096,) * 3 + (2048,) * 8:
                    training.step(rows)
                    session.step()
        assert on_host(training.optimizer) == STATE_BYTES
        return training.times[-1]

    found = last_ns()
    never(monkeypatch)
    assert found <= last_ns()


@pytest.mark.parametrize("gradients", [False, True])
def test_gradients_leave_on_a_machine_without_data_too(gradients: bool) -> None:
    with vdnn.VirtualMachine("rtx-4090") as machine:
        training = Training(machine)
        options: dict[str, Any] = {"optimizer": training.optimizer, "gradients": gradients, "min_bytes": "64KiB"}
        with vdnn.offload("keep", device=machine, limits=vdnn.Limits(offload_window="4MiB"), **options):
            training.model(torch.ones(16, WIDTH)).square().mean().backward()
            before = machine.allocated_bytes
            training.optimizer.zero_grad()
    freed_bytes = before - machine.allocated_bytes
    assert (freed_bytes < 0.3 * STATE_BYTES) == gradients  # they are half as large; some are still on their way


def test_what_stays_is_remembered_by_sessions_that_share_an_engine() -> None:
    budget = int(0.8 * kept_peak())
    with vdnn.VirtualMachine("rtx-4090") as machine:
        training = Training(machine)
        for _ in range(10):
            with session_for(training, budget):
                training.step()
        assert on_host(training.optimizer) < STATE_BYTES
    assert max(training.peaks) <= budget


def _accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    for part in x.chunk(2):
        model(part).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _clipped(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


def _resumed(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    _clipped(model, optimizer, x)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("loop", [_accumulated, _clipped, _resumed])
@pytest.mark.parametrize(
    "options", [{}, {"gradients": True}, {"parameters": "all"}], ids=["state", "gradients", "parameters"]
)
def test_the_bits_are_those_of_plain_pytorch(loop: Callable[..., None], options: dict[str, Any]) -> None:
    def trained(budget: int | None) -> tuple[list[torch.Tensor], int, bool]:
        with vdnn.VirtualMachine("rtx-4090", fake=False) as machine:
            torch.manual_seed(1)
            model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            limits, has_stayed = vdnn.Limits(offload_window="128KiB", reload_window="128KiB"), False
            given: dict[str, Any] = {"optimizer": optimizer, "min_bytes": 0, "limits": limits, **options}
            given |= {"model": model} if "parameters" in options else {}
            session: Session | None = None
            with contextlib.ExitStack() as stack:
                if budget is not None:
                    session = stack.enter_context(vdnn.offload(budget=budget, device=machine, **given))
                for _ in range(10):
                    loop(model, optimizer, torch.randn(512, 128))
                    if session is not None:
                        session.step()
                        has_stayed |= any(session._engine.state_room.staying.values())
                found = [one.detach().clone() for one in model.parameters()]
                found += [one.clone() for state in optimizer.state.values() for one in state.values()]
            if session is not None:
                session.close()
            return found, machine.peak_bytes, has_stayed

    expected, peak_bytes, _ = trained(None)
    found, _, has_stayed = trained(int(0.9 * peak_bytes))
    assert has_stayed
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("rows", "share"), [(512, 0.9), (2048, 0.9), (2048, 0.4)])
@pytest.mark.parametrize("at", [2, 8])
@pytest.mark.parametrize("options", [{}, {"gradients": True}, {"parameters": "all"}], ids=str)
def test_another_optimizer_takes_the_place_of_a_managed_one(
    options: dict[str, Any], at: int, rows: int, share: float
) -> None:
    """A second phase of a training has an optimizer of its own, before it is decided what stays, or after that. Its
    steps may need the room of what stays, and more than that."""

    def trained(budget: int | None) -> tuple[list[torch.Tensor], int]:
        with vdnn.VirtualMachine("rtx-4090", fake=False) as machine, contextlib.ExitStack() as stack:
            torch.manual_seed(1)
            model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)])
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            limits = vdnn.Limits(offload_window="128KiB", reload_window="128KiB")
            given = {"optimizer": optimizer, "min_bytes": 0, "limits": limits, "model": model, **options}
            if budget is not None:
                stack.enter_context(vdnn.offload(budget=budget, device=machine, **given))
            del given
            for step in range(12):
                if step == at:
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                _clipped(model, optimizer, torch.randn(rows if step > at else 512, 128))
            found = [one.detach().clone() for one in model.parameters()]
            return found + [one["momentum_buffer"].clone() for one in optimizer.state.values()], machine.peak_bytes

    expected, peak_bytes = trained(None)
    found, _ = trained(int(share * peak_bytes))
    assert all(map(torch.equal, found, expected))


HOLDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor[1:],
    "numpy": lambda tensor: tensor.numpy(),
}


@pytest.mark.parametrize("hold", HOLDS)
def test_an_alias_that_was_taken_before_the_state_stays_sees_each_step(hold: str) -> None:
    """Its state goes on to move, until the program lets go of it."""

    def trained(budget: int | None) -> tuple[list[torch.Tensor], list[int], int]:
        found: list[torch.Tensor] = []
        with vdnn.VirtualMachine("rtx-4090", fake=False) as machine, contextlib.ExitStack() as stack:
            torch.manual_seed(1)
            model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            limits, away = vdnn.Limits(offload_window="128KiB", reload_window="128KiB"), []
            if budget is not None:
                given: dict[str, Any] = {"optimizer": optimizer, "min_bytes": 0, "limits": limits}
                stack.enter_context(vdnn.offload(budget=budget, device=machine, **given))
            held: list[Any] = []
            for step in range(12):
                _clipped(model, optimizer, torch.randn(512, 128))
                if step == 1:
                    held = [HOLDS[hold](optimizer.state[one]["exp_avg"]) for one in list(model.parameters())[4:8:2]]
                found += [torch.as_tensor(one).clone() for one in held]
                away.append(on_host(optimizer))
                if step == 9:
                    held = []
            return found, away, machine.peak_bytes

    expected, _, peak_bytes = trained(None)
    found, away, _ = trained(peak_bytes)
    assert all(map(torch.equal, found, expected))
    assert away[2] > away[8] == 2 * 4 * 128 * 128 > away[11] == 0


def test_which_state_stays_does_not_depend_on_the_process() -> None:
    """The parameters of the optimizer that was given first keep their state first."""
    budget = int(0.72 * kept_peak())
    with vdnn.VirtualMachine("rtx-4090") as machine:
        training = Training(machine)
        parameters = list(training.model.parameters())
        optimizers = [torch.optim.AdamW([one]) for one in parameters if one.dim() > 1]
        given: dict[str, Any] = {"optimizer": optimizers, "min_bytes": "64KiB"}
        limits = vdnn.Limits(offload_window="4MiB", reload_window="4MiB")
        with vdnn.offload(budget=budget, device=machine, limits=limits, **given) as session:
            for _ in range(10):
                training.model(torch.ones(2048, WIDTH)).square().mean().backward()
                for one in optimizers:
                    one.step()
                    one.zero_grad()
                session.step()
            room, managed_now = session._engine.state_room, session._engine._managed_states()
    stay = [any(map(room.holds_state, one.param_groups[0]["params"])) for one in optimizers]
    assert [state.optimizer for state in managed_now] == optimizers
    assert any(stay)
    assert stay == sorted(stay, reverse=True)


class _Steps:
    """Plans that take 3 ns for each byte that stays beyond 50. Up to 80 fit, and a margin."""

    are_plans_settled = True
    steps_over_budget = 0
    stores_plans = False
    base_ns = 1000

    def record_anew(self, more_bytes: int) -> None:
        raise AssertionError("only state stays")

    leave_room_for = record_anew

    def predicted_ns(self, more_bytes: int) -> int | None:
        return self.base_ns + max(0, more_bytes - 50) * 3 if self.fits_with(more_bytes) else None

    def fits_with(self, more_bytes: int) -> bool:
        return more_bytes <= 85


class _State:
    def __init__(self) -> None:
        self.total = 0
        self.taken_out = 0
        self.stays: set[int] = set()
        self.gradients: Any = SimpleNamespace(bytes_away=list, take_out=lambda: None, window_bytes=int)

    def bytes_away(self) -> list[tuple[int, int]]:
        return [(number, 10) for number in range(10) if number not in self.stays]

    def crossed(self) -> tuple[int, int]:
        self.total += 200
        return self.total, self.total

    def may_stay(self) -> bool:
        return True

    def take_out(self) -> None:
        self.taken_out += 1
        self.stays = set()


def test_the_share_with_the_shortest_step_is_taken_once() -> None:
    """Each byte that stays saves 2 ns of copies, and costs 3 ns beyond 50 bytes: of 0, 20, 40, 60 and 80 bytes that fit
    60 are best."""
    state, steps = _State(), _Steps()
    room = StateRoom(lambda: [state])
    room.stepped(steps)
    assert room.staying[StateKind.STATE] == set()  # how long a byte takes is not known yet
    room.stepped(steps)
    assert room.staying[StateKind.STATE] == set(range(6))
    room.stepped(steps)
    assert room.staying[StateKind.STATE] == set(range(6))


def test_state_alone_stays_where_parameters_gain_too_little_for_a_recording() -> None:
    """50 bytes of state save 100 ns of 10,000. With parameters, steps would be recorded anew."""
    state, steps = _State(), _Steps()
    steps.base_ns = 10_000
    parameters: Any = SimpleNamespace(
        bytes_away=lambda: [(number, 10) for number in range(10)],
        fetched=lambda: (0, 0),
        ahead_bytes=int,
        time_waits=lambda **_: None,
        keep=lambda _: None,
        take_out=lambda: None,
    )
    room = StateRoom(lambda: [state], lambda: [parameters])
    room.stepped(steps)
    room.stepped(steps)
    assert room.staying == {StateKind.PARAMETERS: set(), StateKind.GRADIENTS: set(), StateKind.STATE: set(range(5))}


def test_state_leaves_for_good_after_a_step_over_the_budget() -> None:
    state, steps = _State(), _Steps()
    room = StateRoom(lambda: [state])
    room.stepped(steps)
    room.stepped(steps)
    state.stays = set(room.staying[StateKind.STATE])
    steps.steps_over_budget = 1
    room.stepped(steps)
    assert room.staying[StateKind.STATE] == set()
    assert state.taken_out == 1
    room.stepped(steps)
    assert room.staying[StateKind.STATE] == set()


def test_leaving_tells_the_bytes_that_it_frees() -> None:
    state, steps = _State(), _Steps()
    room = StateRoom(lambda: [state])
    assert room.leave() == 0
    room.stepped(steps)
    room.stepped(steps)
    state.stays = set(room.staying[StateKind.STATE])
    assert room.leave() == 60


def test_what_stays_of_parameters_that_are_gone_is_forgotten_and_decided_again() -> None:
    """The parameters of a later model may have the ids of an earlier one's."""
    state, steps = _State(), _Steps()
    room = StateRoom(lambda: [state])
    room.stepped(steps)
    room.stepped(steps)
    assert room.staying[StateKind.STATE] == set(range(6))
    room.forget_all_but({0, 1, 20})
    assert room.staying[StateKind.STATE] == {0, 1}
    room.stepped(steps)
    assert room.staying[StateKind.STATE] == {0, 1}
    room.forget_all_but(set())
    assert room.staying[StateKind.STATE] == set()
    room.stepped(steps)
    assert room.staying[StateKind.STATE] == set()  # how long a byte takes is measured anew
    room.stepped(steps)
    assert room.staying[StateKind.STATE] == set(range(6))
