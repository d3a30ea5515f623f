"""Training loops whose ranks agree on plans between steps: jobs for tests.integrations.ranks."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel

import vdnn
from tests.integrations.parallel_training import batches, blocks, parameters_of, replicated, sharded
from vdnn.errors import RecomputeError
from vdnn.integrations.ranks import TogetherSession, offload_together
from vdnn.runtime.steps.planner import BudgetPlanner


def train(rank: int, together: TogetherSession | None, steps: int = 20) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(blocks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x in batches(rank, steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if together is not None:
            together.step()
    return parameters_of(model)


def agree(rank: int, budget: str) -> dict[str, Any]:
    plain = train(rank, None)
    with (
        vdnn.VirtualMachine("titan-x", fake=False) as machine,
        offload_together(budget, policy="prefix-cut", device=machine, min_bytes=0) as together,
    ):
        ours = train(rank, together)
    assert together.plan is not None
    return {
        "differing": [name for (name, one), (_, other) in zip(plain, ours, strict=True) if not torch.equal(one, other)],
        "plan": hashlib.sha256(repr(together.plan).encode()).hexdigest(),
        "offloaded_bytes": together.plan.offloaded_bytes,
        "moved": together.session.counters.storages,
        "difference": together.session._engine.steps.first_difference,
    }


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"DDP": replicated, "FSDP2": sharded}


def gathered_bytes(model: torch.nn.Module) -> int:
    """The parameters of a block. A thread of gloo holds them for a moment after they were gathered: in some steps the
    peak of plain FSDP2 is larger by just that."""
    return max(sum(one.numel() * one.element_size() for one in block.parameters()) for block in model.children())


def run_with_a_folder(rank: int, folder: str, kind: str, rows: int = 128, **options: Any) -> dict[str, Any]:
    """Trains for 8 steps under a budget, plain and by ranks that agree on a plan and keep it in a folder."""

    def trained(together: TogetherSession | None, model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for x in batches(rank, 8):
            model(x[:rows]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if together is not None:
                recorded.append(together.plan is None)
                peaks.append(machine.peak_bytes)
                together.step()
                machine.reset_peak()
        return parameters_of(model)

    def made() -> torch.nn.Module:
        torch.manual_seed(0)
        return MODELS[kind]()

    recorded: list[bool] = []
    peaks: list[int] = []
    plain = trained(None, made())
    planned = BudgetPlanner.planned
    with vdnn.VirtualMachine("titan-x", fake=False) as machine:
        model = made()
        given = {"device": machine, "min_bytes": 0, "plans": folder, "model": model, **options}
        with mock.patch.object(BudgetPlanner, "planned", autospec=True, side_effect=planned) as planner:
            together = offload_together("min", policy="prefix-cut", **given)
            with together:
                machine.reset_peak()
                before = together.plan is not None
                ours = trained(together, model)
        together.session.close()
    return {
        "differing": [name for (name, one), (_, other) in zip(plain, ours, strict=True) if not torch.equal(one, other)],
        "planned_before": before,
        "recorded": sum(recorded),
        "peaks": peaks,
        "budget_bytes": together.plan and together.plan.budget_bytes,
        "gathered_bytes": gathered_bytes(model) if kind == "FSDP2" else 0,
        "plans_made": planner.call_count,
        "plan": hashlib.sha256(repr(together.plan).encode()).hexdigest(),
        "follows_stored": together.follows_stored,
        "lines": together.lines,
        "moved": together.session.counters.storages,
        "difference": together.session._engine.steps.first_difference,
    }


def a_recompute_is_wrong(rank: int, folder: str) -> tuple[bool, bool]:
    """Leaves a run that follows a stored plan by the error of a recheck. Returns whether it followed it, and whether
    the file of this rank is still there."""
    with vdnn.VirtualMachine("titan-x", fake=False) as machine:
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": machine, "min_bytes": 0, "plans": folder, "model": replicated()}
        together = offload_together("min", policy="prefix-cut", **options)
        with contextlib.suppress(RecomputeError), together:
            raise RecomputeError(storages=1, first="one", recipe="gelu", step=0, since=0)
        assert together._stored is not None
        return together.follows_stored, together._stored.path.exists()


def each_by_itself(rank: int, folder: str, kind: str) -> dict[str, int]:
    """Trains for 6 steps under a budget in a session of vdnn.offload with a plan folder."""
    with vdnn.VirtualMachine("titan-x", fake=False) as machine:
        torch.manual_seed(0)
        model = MODELS[kind]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with vdnn.offload(budget="112KiB", device=machine, min_bytes=0, plans=folder) as session:
            for x in batches(rank, 6):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        use = session._engine.steps.plan_use
        session.close()
    assert use is not None
    return {"recorded": use.recorded}


def one_cannot_meet_its_budget(rank: int) -> None:
    with (
        vdnn.VirtualMachine("titan-x", fake=False) as machine,
        offload_together("1KiB" if rank == 1 else "min", device=machine, min_bytes=0) as together,
    ):
        train(rank, together)


def one_does_not_come(rank: int) -> None:
    with (
        vdnn.VirtualMachine("titan-x", fake=False) as machine,
        offload_together("min", device=machine, min_bytes=0, limit_s=2, warmup_steps=0) as together,
    ):
        if rank == 0:
            blocks()(next(batches(rank))).sum().backward()
            together.step()


def nothing(rank: int) -> None:
    """Has the module imported."""


def one_waits_for_ever(rank: int) -> None:
    if rank == 1:
        threading.Event().wait()
