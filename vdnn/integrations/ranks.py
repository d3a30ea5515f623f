"""One plan for all ranks: each records its step, and between two steps they agree on a plan, or all stop.

Ranks that plan for themselves may raise alone (a budget that only one of them cannot meet), and leave the others
waiting in a collective; and plans that differ make the fastest rank wait for the slowest. So nothing is planned inside
a hook here: after the recorded step each rank plans, all hear of all, and those whose steps are alike follow one plan.
How the model is spread is torch's affair.

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

from vdnn.bytesize import format_bytes, parse_bytes
from vdnn.errors import RankError, VdnnError
from vdnn.planning.budget import parse_budget
from vdnn.planning.catalogue import make_planner
from vdnn.planning.simulate import simulate
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.offload import offload
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording
from vdnn.step.timeline import Timeline

logger = logging.getLogger("vdnn")


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a rank tells the others. `order` names the order of its saves and uses; a `problem` ends it for all."""

    order: str
    peak_bytes: int
    plan: Plan | None
    problem: str = ""


class TogetherSession(contextlib.AbstractContextManager["TogetherSession"]):
    """What runs inside `with offload_together(...)`. Entering and step() are for all ranks, in the same order."""

    def __init__(
        self, planner: BudgetPlanner, warmup_steps: int, limit_s: float, host_bytes: int | None, options: dict[str, Any]
    ) -> None:
        self._planner = planner
        self._recorded_after = warmup_steps + 1
        self._limit_s = limit_s
        self._options = {**options, "host_budget": host_bytes}
        self._group: Any = None
        self._steps = 0
        self.plan: Plan | None = None
        self.session: Session = offload("vdnn-all", measure=True, warmup_steps=warmup_steps, **self._options)

    def __enter__(self) -> TogetherSession:
        # A group of its own: over gloo, on the host, with a time limit that training need not have.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._limit_s))
        self.session.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.session.__exit__(*exception)

    def step(self) -> None:
        """Ends a step. After the recorded one the ranks agree on a plan, which is followed from the next on."""
        self.session.step()
        self._steps += 1
        if self._steps == self._recorded_after:
            self._follow(self._agreed())

    def _agreed(self) -> Plan | None:
        recording, measured = self.session.recording, self.session.timeline
        mine = propose(recording, measured, self._planner)
        if recording is None or mine.plan is None:
            self._tell(mine)
            return None
        chosen = choose(self._tell(mine), dist.get_rank())
        timeline = simulate(recording, chosen, self._planner.costs(measured))
        fits = timeline.peak_bytes <= self._planner.budget_bytes(recording)
        return chosen if fits else mine.plan

    def _tell(self, mine: Proposal) -> list[Proposal]:
        """All proposals, by rank. Raises on all ranks if one of them has a problem."""
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
        logger.info("vdnn: %d ranks agreed; %s leave the device here.", dist.get_world_size(), self._moved())

    def _moved(self) -> str:
        return format_bytes(0 if self.plan is None else self.plan.offloaded_bytes)


def offload_together(
    budget: int | str | None = None,
    *,
    policy: str = "auto",
    host_budget: int | str | None = None,
    warmup_steps: int = 1,
    limit_s: float = 300,
    device: Any = None,
    **options: Any,
) -> TogetherSession:
    """For the ranks of torch.distributed, which must be initialised. The options are those of vdnn.offload; `budget`
    and `host_budget` are of each rank. Whoever waits for the others' plans longer than `limit_s` raises."""
    if not dist.is_available() or not dist.is_initialized():
        raise VdnnError(
            "offload_together: torch.distributed is not initialised. Call torch.distributed.init_process_group first, "
            "or use vdnn.offload in a process that is alone."
        )
    host_bytes = None if host_budget is None else parse_bytes(host_budget)
    profile = device.profile if isinstance(device, VirtualMachine) else None
    wanted = None if budget is None else parse_budget(budget)
    planner = BudgetPlanner(make_planner(policy), wanted, host_bytes, profile)
    return TogetherSession(planner, warmup_steps, limit_s, host_bytes, {**options, "device": device})


def propose(recording: Recording | None, measured: Timeline | None, planner: BudgetPlanner) -> Proposal:
    """What this rank has to say, problems included: it must not raise while the others wait to hear it."""
    if recording is None or not recording.lifetimes:
        return Proposal("", 0, None)
    try:
        plan = planner.plan(recording, measured)
    except (VdnnError, ValueError) as error:
        return Proposal("", recording.peak_bytes, None, str(error))
    return Proposal(order_of(recording), recording.peak_bytes, plan)


def order_of(recording: Recording) -> str:
    """Equal for steps that save and use the same things in the same order."""
    points = [(point.kind.value, point.lifetime, str(point.key)) for point in recording.points]
    sizes = [lifetime.nbytes for lifetime in recording.lifetimes]
    return hashlib.sha256(repr((points, sizes)).encode()).hexdigest()


def choose(proposals: list[Proposal], rank: int) -> Plan:
    """Of the ranks whose steps are like this one's, the plan of that which needs most memory; of equals the first's."""
    mine = proposals[rank]
    alike = [proposal for proposal in proposals if proposal.order == mine.order and proposal.plan is not None]
    chosen = max(alike, key=lambda proposal: proposal.peak_bytes).plan
    assert chosen is not None, "a rank without a plan chooses none"
    return chosen


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
