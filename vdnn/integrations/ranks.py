"""One plan for all ranks: each records its step, and between two steps they agree on a plan, or all stop.

A rank that plans alone may raise alone, if only its own budget cannot be met, and leave the others waiting in a
collective. Plans that differ make the fastest rank wait for the slowest. So ranks do not plan inside a hook: after the
recorded step each rank plans, all ranks exchange their plans, and ranks with equal steps follow one plan. torch
distributes the model.

    with offload_together(budget="60GiB") as ranks:
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            ranks.step()
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vdnn.bytesize import format_bytes
from vdnn.errors import RankError, VdnnError
from vdnn.planning.budget import parse_budget
from vdnn.planning.catalogue import make_quick_planner
from vdnn.planning.simulate import simulate
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.limits import Limits
from vdnn.runtime.session.offload import offload
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording
from vdnn.step.timeline import Timeline

logger = logging.getLogger("vdnn")


@dataclass(frozen=True, slots=True)
class Proposal:
    """The message of one rank to the others. `order` is a hash of its saves and uses; a `problem` stops all ranks."""

    order: str
    peak_bytes: int
    plan: Plan | None
    problem: str = ""


class TogetherSession(contextlib.AbstractContextManager["TogetherSession"]):
    """The context manager that offload_together returns. All ranks enter it and call step(), in the same order."""

    def __init__(self, planner: BudgetPlanner, warmup_steps: int, limit_s: float, options: dict[str, Any]) -> None:
        self._planner = planner
        self._recorded_after = warmup_steps + 1
        self._limit_s = limit_s
        self._options = options
        self._group: Any = None
        self._steps = 0
        self.plan: Plan | None = None
        self.session: Session = offload("vdnn-all", measure=True, warmup_steps=warmup_steps, **self._options)

    def __enter__(self) -> TogetherSession:
        # A separate gloo group on the host, with a time limit that does not apply to the training's collectives.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._limit_s))
        self.session.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.session.__exit__(*exception)

    def step(self) -> None:
        """Ends a step. After the recorded step the ranks agree on a plan and follow it from the next step on."""
        self.session.step()
        self._steps += 1
        if self._steps == self._recorded_after:
            self._follow(self._agree())

    def _agree(self) -> Plan | None:
        recording, measured = self.session.recording, self.session.timeline
        mine = propose(recording, measured, self._planner)
        if recording is None or mine.plan is None:
            self._exchange(mine)
            return None
        chosen = choose(self._exchange(mine), dist.get_rank())
        timeline = simulate(recording, chosen, self._planner.costs(measured))
        fits = timeline.peak_bytes <= self._planner.budget_bytes(recording)
        return chosen if fits else mine.plan

    def _exchange(self, mine: Proposal) -> list[Proposal]:
        """Sends this rank's proposal and returns all of them, by rank. Raises on all ranks if one has a problem."""
        proposals: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(proposals, mine, group=self._group)
        except RuntimeError as error:
            raise RankError(
                rank=dist.get_rank(),
                ranks=len(proposals),
                reason=f"the others did not agree on a plan within {self._limit_s:g} s ({_first_line(error)})",
            ) from error
        for rank, proposal in enumerate(proposals):
            if proposal.problem:
                raise RankError(rank=rank, ranks=len(proposals), reason=proposal.problem)
        return proposals

    def _follow(self, plan: Plan | None) -> None:
        if plan is None:
            return
        self.session.__exit__(None, None, None)
        self.session.close()
        self.plan = plan
        self.session = offload(plan=plan, **self._options)
        self.session.__enter__()
        offloaded = format_bytes(plan.offloaded_bytes)
        logger.info("vdnn: %d ranks agreed on a plan; this rank offloads %s.", dist.get_world_size(), offloaded)


def offload_together(
    budget: int | str | None = None,
    *,
    policy: str = "auto",
    warmup_steps: int = 1,
    limit_s: float = 300,
    device: Any = None,
    limits: Limits = Limits(),  # noqa: B008  # it is frozen
    **options: Any,
) -> TogetherSession:
    """Makes a session on each rank of torch.distributed, which must be initialised, with the options of vdnn.offload.

    `budget` and `limits` apply to each rank. A rank that waits for the others' plans longer than `limit_s` raises.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise VdnnError(
            "offload_together: torch.distributed is not initialised. Call torch.distributed.init_process_group first, "
            "or use vdnn.offload in a single process."
        )
    profile = device.profile if isinstance(device, VirtualMachine) else None
    wanted = None if budget is None else parse_budget(budget)
    planner = BudgetPlanner(make_quick_planner(policy), wanted, limits.host_bytes, profile)
    return TogetherSession(planner, warmup_steps, limit_s, {**options, "device": device, "limits": limits})


def propose(recording: Recording | None, measured: Timeline | None, planner: BudgetPlanner) -> Proposal:
    """This rank's proposal. An error becomes its `problem`: the rank must not raise while the others wait for it."""
    if recording is None or not recording.lifetimes:
        return Proposal("", 0, None)
    try:
        plan = planner.planned(recording, measured).plan
    except (VdnnError, ValueError) as error:
        return Proposal("", recording.peak_bytes, None, str(error))
    return Proposal(order_of(recording), recording.peak_bytes, plan)


def order_of(recording: Recording) -> str:
    """Equal for steps that save and use the same things in the same order."""
    points = [(point.kind.value, point.lifetime, str(point.key)) for point in recording.points]
    sizes = [lifetime.nbytes for lifetime in recording.lifetimes]
    return hashlib.sha256(repr((points, sizes)).encode()).hexdigest()


def choose(proposals: list[Proposal], rank: int) -> Plan:
    """Among the ranks whose steps equal this rank's, the plan of the one with the highest peak, the first of equals.

    This rank must have a plan."""
    order = proposals[rank].order
    plans = [(each.peak_bytes, each.plan) for each in proposals if each.order == order and each.plan is not None]
    return max(plans, key=lambda peak_and_plan: peak_and_plan[0])[1]


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
