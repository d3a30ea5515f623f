"""Sessions under budgets on a device whose tensors are not the CPU's: steps that are recorded, planned and followed
have the bits of plain PyTorch, whatever leaves, in every mode of the accelerator.

Tensors of virtual machines are the CPU's. There an operand that was left on the host goes unnoticed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import vdnn
from deferred import Mode
from deferred.deferred_accelerator import DeferredAccelerator
from tests.deferred.gauges import DeferredGauges
from tests.deferred.models import MODELS, Case

STEPS = 8
SHARES = (0.95, 0.7, 0.5, 0.35)
# Gates of one storage with counters of their own: a copy of all of it reads beside a write to another gate.
RECURRENT = ("lstm", "gru")
PLAIN = [name for name in MODELS if name not in RECURRENT]


class Ran(NamedTuple):
    values: list[Any]
    peak_bytes: int
    report: str


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(4)])


CASES = {name: MODELS[name] for name in PLAIN} | {"layers": Case(layers, lambda: torch.randn(32, 64))}


def inputs_of(case: Case, step: int) -> torch.Tensor:
    x = case.make_input()
    return x if x.dtype == torch.int64 else torch.sin(torch.cat([x] * 4) + step)


def train(name: str, mode: Mode, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any] | None) -> Ran:
    with DeferredAccelerator(mode, seed=5, capacity="64MiB") as accelerator, contextlib.ExitStack() as sessions:
        opening = importlib.import_module("vdnn.runtime.session.offload")
        monkeypatch.setattr(
            opening, "_gauges", lambda _, one: DeferredGauges(one.torch_device, one.device, accelerator)
        )
        torch.manual_seed(0)
        case = CASES[name]
        model = case.make().to("deferred")
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
        session: Any = contextlib.nullcontext()
        if options is not None:
            session = vdnn.offload(device=accelerator, min_bytes=0, model=model, optimizer=optimizer, **options)
            sessions.enter_context(contextlib.closing(session))
        values: list[Any] = []
        with session:
            for step in range(STEPS):
                loss = model(inputs_of(case, step).to("deferred")).float().square().mean()
                loss.backward()
                values.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        accelerator.synchronize()
        assert accelerator.violations == []
        values += [one.detach().cpu().clone() for one in (*model.parameters(), *model.buffers())]
        return Ran(values, accelerator.memory.peak_bytes, "" if options is None else session.report())


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.drawn(of=12)
@pytest.mark.parametrize("parameters", [None, "frozen", "all"])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", CASES)
def test_steps_under_a_budget_have_the_bits(
    name: str, share: float, parameters: str | None, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(name, mode, monkeypatch, None)
    options: dict[str, Any] = {"budget": int(share * plain.peak_bytes)}
    if parameters is not None:
        options["parameters"] = parameters
    try:
        ran = train(name, mode, monkeypatch, options)
    except vdnn.BudgetError:
        pytest.skip("no plan meets this budget")
    assert same(plain.values, ran.values)


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("parameters", [None, "all"])
def test_they_recompute_there(parameters: str | None, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train("layers", mode, monkeypatch, None)
    options: dict[str, Any] = {"budget": int(0.5 * plain.peak_bytes)}
    ran = train("layers", mode, monkeypatch, options if parameters is None else options | {"parameters": parameters})
    assert same(plain.values, ran.values)
    (line,) = [one for one in ran.report.splitlines() if one.endswith(" recomputes")]
    assert int(line.split()[0]) > 0


def test_what_a_session_has_learned_keeps_no_model_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a class for each module with a parametrization, which refers to the module."""
    with DeferredAccelerator(Mode.EARLY, capacity="64MiB") as accelerator:
        opening = importlib.import_module("vdnn.runtime.session.offload")
        monkeypatch.setattr(
            opening, "_gauges", lambda _, one: DeferredGauges(one.torch_device, one.device, accelerator)
        )

        def train() -> None:
            norm = parametrizations.weight_norm(nn.Linear(64, 64))
            model = nn.Sequential(norm, nn.Tanh(), nn.Linear(64, 64)).to("deferred")
            with contextlib.closing(vdnn.offload(budget="120KiB", device=accelerator, min_bytes=0)) as session, session:
                for _ in range(6):
                    model(torch.ones(64, 64).to("deferred")).square().mean().backward()
                    session.step()
                    model.zero_grad()
                assert session.plan is not None

        train()
        gc.collect()
        accelerator.synchronize()
        assert accelerator.memory.allocated_bytes == 0
