"""A session that is given a model and an optimizer lets gradients and parameters leave only if the budget needs it."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from vdnn.runtime.session.as_needed import AsNeeded, Extent
from vdnn.runtime.session.managed_optimizers import states_of
from vdnn.runtime.session.session import Session

pytestmark = pytest.mark.filterwarnings("ignore::vdnn.user_warnings.VdnnWarning")
WIDTH, DEPTH, ROWS = 128, 12, 256
WEIGHT_BYTES = DEPTH * 4 * WIDTH * WIDTH
NARROW = vdnn.Limits(offload_window="64KiB", reload_window="64KiB")
_NEARLY = 1.02  # near the least budget the windows of copies may take it
Step = Callable[["Training"], None]


class Training:
    """A small training on a virtual machine with data. One activation takes a sixth of its weights."""

    def __init__(self, machine: vdnn.VirtualMachine) -> None:
        torch.manual_seed(1)
        self.machine = machine
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)]
        self.model = nn.Sequential(*layers, nn.Linear(WIDTH, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.losses: list[torch.Tensor] = []
        self.peaks: list[int] = []
        self.steps = 0

    def loss(self, rows: int = ROWS) -> torch.Tensor:
        return self.model(torch.randn(rows, WIDTH)).square().mean()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def found(self) -> list[torch.Tensor]:
        """Copies of all that a training has."""
        found = [one.detach().clone() for one in self.model.parameters()]
        return [
            *found,
            *(one.clone() for state in self.optimizer.state.values() for one in state.values()),
            *self.losses,
        ]


def plainly(training: Training) -> None:
    loss = training.loss()
    loss.backward()
    training.losses.append(loss.detach().clone())
    training.step()


def accumulated(training: Training) -> None:
    for _ in range(2):
        training.loss().backward()
    training.step()


def clipped(training: Training) -> None:
    training.loss().backward()
    norm = nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
    training.losses.append(norm.clone())
    training.step()
    training.scheduler.step()


def evaluated(training: Training) -> None:
    plainly(training)
    training.model.eval()
    with torch.no_grad():
        training.losses.append(training.loss(64))
    training.model.train()


def resumed(training: Training) -> None:
    plainly(training)
    if training.steps == 8:
        training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def unfrozen(training: Training) -> None:
    """A layer is frozen in every third step."""
    training.model.get_parameter("1.0.weight").requires_grad_(training.steps % 3 != 1)
    plainly(training)


def kept_in_a_graph(training: Training) -> None:
    """A second graph lives while the optimizer steps."""
    early = training.loss(256)
    plainly(training)
    del early


def scaled(training: Training) -> None:
    """The step is skipped now and then, as by a GradScaler."""
    training.loss().backward()
    if training.steps % 4 != 2:
        training.optimizer.step()
    training.optimizer.zero_grad()


LOOPS: dict[str, Step] = {
    one.__name__: one for one in (plainly, accumulated, clipped, evaluated, resumed, unfrozen, kept_in_a_graph, scaled)
}


def trained(
    loop: Step, budget: int | None, steps: int = 10, *, per_step: bool = False, **options: Any
) -> tuple[Training, Session | None]:
    with vdnn.VirtualMachine("rtx-4090", fake=False) as machine:
        training, session = Training(machine), None
        if budget is not None:
            given = {"model": training.model, "optimizer": training.optimizer, "min_bytes": 0, "limits": NARROW}
            session = vdnn.offload(budget=budget, device=machine, **{**given, **options})
        with contextlib.ExitStack() as stack:
            if session is not None and not per_step:
                stack.enter_context(session)
            for number in range(steps):
                training.steps = number
                machine.reset_peak()
                with session if session is not None and per_step else contextlib.nullcontext():
                    loop(training)
                training.peaks.append(machine.peak_bytes)
        training.losses = training.found()
        if session is not None:
            session.close()
    return training, session


EXPLICIT: dict[Extent, dict[str, Any]] = {
    Extent.STATE: {"gradients": False},
    Extent.GRADIENTS: {"gradients": True},
    Extent.PARAMETERS: {"parameters": "all"},
}


@functools.cache
def least_of(loop: Step, extent: Extent) -> int:
    """The least budget of a session with this extent, as its refusal says it."""
    with pytest.raises(vdnn.BudgetError) as refused:
        trained(loop, WEIGHT_BYTES // 2, **EXPLICIT[extent])
    return refused.value.least_bytes


def extent_of(session: Session | None) -> Extent:
    assert session is not None
    assert session._as_needed is not None
    return session._engine.extents.of(session._as_needed.model) or Extent.STATE


def budget_for(extent: Extent, loop: Step = plainly) -> int:
    """A budget that a session meets with this extent, and with no smaller one."""
    if extent is Extent.STATE:
        return least_of(loop, extent) + WEIGHT_BYTES // 8
    return least_of(loop, Extent(extent - 1)) - WEIGHT_BYTES // 32


@pytest.fixture
def from_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions begin as if the budget had room for everything but the state."""
    monkeypatch.setattr(AsNeeded, "at_begin", lambda *_: Extent.STATE)


@pytest.mark.parametrize(("times", "extent"), [(3.0, Extent.STATE), (2.0, Extent.GRADIENTS), (1.2, Extent.PARAMETERS)])
def test_what_leaves_is_known_as_the_session_begins(times: float, extent: Extent) -> None:
    """An eighth of the budget is for activations, the rest for weights and gradients that stay, and windows."""
    _, session = trained(plainly, int(times * WEIGHT_BYTES), 0)
    assert session is not None
    assert extent_of(session) is extent
    assert any("has no room for them" in line for line in session.report().splitlines()) == (extent > Extent.STATE)


@pytest.mark.usefixtures("from_the_least")
@pytest.mark.parametrize("extent", Extent)
def test_what_leaves_grows_until_the_budget_is_met(extent: Extent) -> None:
    budget = budget_for(extent)
    training, session = trained(plainly, budget)
    assert session is not None
    assert extent_of(session) is extent
    assert max(training.peaks[5:]) <= _NEARLY * budget
    assert any("were needed" in line for line in session.report().splitlines()) == (extent > Extent.STATE)


@pytest.mark.usefixtures("from_the_least")
@pytest.mark.parametrize("extent", [Extent.GRADIENTS, Extent.PARAMETERS])
@pytest.mark.parametrize(("loop", "per_step"), [*((loop, False) for loop in LOOPS), ("clipped", True)])
def test_the_bits_are_those_of_plain_pytorch_when_more_leaves(
    loop: str, extent: Extent, per_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = least_of(LOOPS[loop], Extent.STATE) - WEIGHT_BYTES // 8
    monkeypatch.setattr(AsNeeded, "beyond", lambda *_: extent)
    expected, _ = trained(LOOPS[loop], None)
    found, session = trained(LOOPS[loop], budget, per_step=per_step)
    assert all(map(torch.equal, found.losses, expected.losses))
    assert extent_of(session) is extent


@pytest.mark.usefixtures("from_the_least")
@pytest.mark.parametrize("extent", [Extent.GRADIENTS, Extent.PARAMETERS])
def test_only_the_step_that_shows_the_need_is_over_the_budget(extent: Extent) -> None:
    budget = budget_for(extent)
    training, session = trained(plainly, budget)
    assert extent_of(session) is extent
    assert training.peaks[0] > budget
    assert max(training.peaks[1:]) <= _NEARLY * budget


@pytest.mark.parametrize("window", ["64KiB", "192KiB"])
def test_a_session_that_has_grown_takes_the_time_of_one_that_began_so(
    window: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plans are made from steps as late as those of a session which manages everything from the start."""
    budget = budget_for(Extent.PARAMETERS)
    lasting_ns = []
    for begins_with in (Extent.STATE, Extent.PARAMETERS):
        monkeypatch.setattr(AsNeeded, "at_begin", lambda *_, begin=begins_with: begin)
        times_ns: list[int] = []

        def timed(training: Training, times_ns: list[int] = times_ns) -> None:
            began_ns = training.machine.now_ns
            plainly(training)
            times_ns.append(training.machine.now_ns - began_ns)

        limits = vdnn.Limits(offload_window=window, reload_window=window)
        _, session = trained(timed, budget, limits=limits)
        assert extent_of(session) is Extent.PARAMETERS
        lasting_ns.append(times_ns[-1])
    assert lasting_ns[0] == lasting_ns[1]


@pytest.mark.parametrize(("times", "window"), [(1.7, "512KiB"), (2.2, "768KiB")])
def test_the_first_step_of_an_optimizer_has_room_for_the_state_that_it_makes(times: float, window: str) -> None:
    """Its slices come one ahead of the other, and the state of the one that is stepped is not there yet."""
    budget, limits = int(times * WEIGHT_BYTES), vdnn.Limits(offload_window=window, reload_window=window)

    def with_few_rows(training: Training) -> None:
        training.loss(32).backward()
        training.step()

    training, session = trained(with_few_rows, budget, 1, limits=limits)
    assert extent_of(session) is Extent.PARAMETERS
    assert training.peaks[0] <= budget


def test_gradients_that_are_told_to_stay_stay() -> None:
    with pytest.raises(vdnn.BudgetError):
        trained(plainly, budget_for(Extent.GRADIENTS), gradients=False)


@pytest.mark.usefixtures("from_the_least")
def test_a_step_is_refused_where_no_more_can_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsNeeded, "largest", lambda _: Extent.STATE)
    with pytest.raises(vdnn.BudgetError):
        trained(plainly, budget_for(Extent.GRADIENTS))


@pytest.mark.usefixtures("from_the_least")
def test_a_step_is_refused_where_the_optimizer_always_steps_inside_of_a_module() -> None:
    """Parameters that a module uses cannot begin to leave."""

    def inside(training: Training) -> None:
        training.loss().backward()
        handle = training.model[0].register_forward_hook(lambda *_: training.step())
        with torch.no_grad():
            training.model(torch.zeros(1, WIDTH))
        handle.remove()

    with pytest.raises(vdnn.BudgetError, match="cannot be met"):
        trained(inside, budget_for(Extent.GRADIENTS))


def test_a_compiled_module_keeps_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert AsNeeded(model, states_of(model, optimizer)).largest() is Extent.GRADIENTS


@pytest.mark.parametrize(
    "options",
    [{"budget": "min"}, {"optimizer_on": "cpu"}, {"optimizer_step": "deferred"}, {"gradients": False}],
    ids=str,
)
def test_what_leaves_is_as_told_where_something_is_told(options: dict[str, Any]) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with vdnn.VirtualMachine("rtx-4090") as machine:
        device = {} if "optimizer_on" in options else {"device": machine}
        if not device:
            options = {**options, "policy": "vdnn-all", "device": "sim"}
        session = vdnn.offload(model=model, optimizer=optimizer, **{"budget": None, **device, **options})
    assert session._as_needed is None
