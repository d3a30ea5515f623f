"""A session follows the plan of a whole training: what leaves of each parameter, from the first step on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.training_state.conftest import on_host
from vdnn.runtime.session.as_needed import Extent
from vdnn.runtime.session.session import Session
from vdnn.runtime.training_state.parameters.away_parameter import away_of
from vdnn.step.training_plan import PlacedParameter, TrainingPlan

pytestmark = pytest.mark.filterwarnings("ignore::vdnn.user_warnings.VdnnWarning")
WIDTH, DEPTH, ROWS = 1024, 8, 4096
NARROW = vdnn.Limits(offload_window="8MiB", reload_window="8MiB")


def layers(width: int = WIDTH, depth: int = DEPTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def planned(budget: int, width: int = WIDTH, depth: int = DEPTH, **options: Any) -> vdnn.TrainingReport:
    return vdnn.plan_training(
        lambda rows: (layers(width, depth), torch.ones(rows, width)),
        ROWS,
        hardware="rtx-4090",
        budget=budget,
        host="64GiB",
        optimizer="adamw",
        clip=False,
        loss=loss,
        **options,
    )


def kept_peak() -> int:
    return planned(1 << 34).kept_peak_bytes


def followed(plan: TrainingPlan, steps: int = 8) -> tuple[list[int], list[int], Session, int]:
    """The times and peaks of the steps, the session, and the bytes of parameters on the host after the last one."""
    times, peaks = [], []
    with vdnn.VirtualMachine("rtx-4090") as machine:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters())
        with vdnn.offload(plan=plan, device=machine, model=model, optimizer=optimizer, limits=NARROW) as session:
            for _ in range(steps):
                machine.reset_peak()
                began = machine.now_ns
                loss(model(torch.ones(ROWS, WIDTH))).backward()
                optimizer.step()
                optimizer.zero_grad()
                session.step()
                times.append(machine.now_ns - began)
                peaks.append(machine.peak_bytes)
            known = [away for one in model.parameters() if (away := away_of(one)) is not None]
            streamed = sum(away.nbytes for away in known if not away.stays)
            weights = [one for one in plan.parameters if one.name.endswith("weight")]  # a bias is below min_bytes
            assert on_host(optimizer) == 2 * sum(one.nbytes for one in weights if one.state_leaves)
    return times, peaks, session, streamed


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3])
def test_a_session_does_what_the_plan_says_within_its_budget(share: float) -> None:
    budget = int(share * kept_peak())
    report = planned(budget)
    times, peaks, session, streamed = followed(report.plan)
    weights = [one for one in report.plan.parameters if one.name.endswith("weight")]
    assert streamed == sum(one.nbytes for one in weights if one.streams)
    assert max(peaks) <= budget
    assert times[-1] <= 1.5 * report.step_ns  # it assumes that copies of state overlap with backward
    assert "the plan of" in session.report()


def test_the_plan_of_a_saved_report_is_followed_too(tmp_path: Path) -> None:
    report = planned(int(0.3 * kept_peak()))
    report.save(tmp_path / "plan.json")
    assert vdnn.TrainingReport.load(tmp_path / "plan.json").plan == report.plan


@pytest.mark.parametrize(
    "kinds", [("streams",), ("gradient_leaves",), ("state_leaves",), ("streams", "gradient_leaves")]
)
def test_the_bits_are_those_of_plain_pytorch(kinds: tuple[str, ...]) -> None:
    """Every other parameter leaves, or its gradient or state."""
    leaving = dict.fromkeys(kinds, True)

    def trained(*, is_managed: bool) -> list[torch.Tensor]:
        with vdnn.VirtualMachine("rtx-4090", fake=False) as machine:
            model = layers(64, 6)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            placed = [
                PlacedParameter(name, one.nbytes, **(leaving if number % 4 == 0 else {}))
                for number, (name, one) in enumerate(model.named_parameters())
            ]
            plan = TrainingPlan("layers", 4 << 20, tuple(placed))
            given: dict[str, Any] = {"model": model, "optimizer": optimizer, "min_bytes": 0, "device": machine}
            session = vdnn.offload(plan=plan, **given) if is_managed else vdnn.offload("keep", device=machine)
            with session:
                for number in range(8):
                    torch.manual_seed(number)
                    for part in torch.randn(512, 64).chunk(2):
                        loss(model(part)).backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                    optimizer.step()
                    optimizer.zero_grad()
                    with torch.no_grad():
                        model(torch.ones(2, 64))
                found = [one.detach().clone() for one in model.parameters()]
                found += [one.clone() for state in optimizer.state.values() for one in state.values()]
            session.close()
        return found

    assert all(map(torch.equal, trained(is_managed=True), trained(is_managed=False)))


def _given(plan: TrainingPlan, **options: Any) -> Session:
    model = layers(64, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with vdnn.VirtualMachine("rtx-4090") as machine:
        return vdnn.offload(plan=plan, device=machine, **{"model": model, "optimizer": optimizer, **options})


def _plan_of(model: nn.Module) -> TrainingPlan:
    placed = tuple(PlacedParameter(name, one.nbytes) for name, one in model.named_parameters())
    return TrainingPlan("layers", 1 << 30, placed)


def test_a_plan_of_another_model_is_refused_before_anything_moves() -> None:
    with pytest.raises(ValueError, match=r"that of layers: it has a parameter 2\.0\.weight, which the model has not"):
        _given(_plan_of(layers(64, 3)))
    with pytest.raises(ValueError, match=r"its parameter 0\.0\.weight has 4096 bytes, and the model's has 16384"):
        _given(_plan_of(layers(32, 2)))
    with pytest.raises(ValueError, match=r"the model has a parameter 1\.0\.weight, which it has not"):
        _given(_plan_of(layers(64, 1)))


def test_a_plan_needs_the_model_and_its_optimizer_and_nothing_else() -> None:
    plan = _plan_of(layers(64, 2))
    for options in ({"optimizer": None, "model": None}, {"parameters": "all"}, {"gradients": True}):
        with pytest.raises(ValueError, match="plan: it says what leaves of a model and its optimizer"):
            _given(plan, **options)
    with pytest.raises(ValueError, match="a plan has a budget of its own"):
        _given(plan, budget="1GiB")


def test_a_plan_that_no_session_follows_says_why() -> None:
    report = planned(int(0.3 * kept_peak()), allow=("deferred",))
    plan = dataclasses.replace(report, step_time="before the next forward").plan
    with pytest.raises(ValueError, match="no session follows this one: its optimizer steps on the CPU, in backward or"):
        _given(plan)
    with pytest.raises(ValueError, match="without the names of parameters"):
        _given(dataclasses.replace(report, parameters=()).plan)


def test_what_stays_by_a_plan_leaves_when_longer_steps_need_the_room() -> None:
    plan = _plan_of(layers())
    budget = int(0.45 * planned(1 << 34).kept_peak_bytes)
    placed = tuple(dataclasses.replace(one, streams=one.name == "0.0.weight") for one in plan.parameters)
    plan = dataclasses.replace(plan, budget_bytes=budget, parameters=placed)
    peaks = []
    with vdnn.VirtualMachine("rtx-4090") as machine:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters())
        with vdnn.offload(plan=plan, device=machine, model=model, optimizer=optimizer, limits=NARROW) as session:
            for rows in (ROWS // 4,) * 6 + (ROWS,) * 8:
                machine.reset_peak()
                loss(model(torch.ones(rows, WIDTH))).backward()
                optimizer.step()
                optimizer.zero_grad()
                session.step()
                peaks.append(machine.peak_bytes)
            assert session._engine.extents.of(model) is Extent.PARAMETERS
            assert "leaves the device again" in session.report()
    assert max(peaks[-4:]) <= budget
