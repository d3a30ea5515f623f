"""One plan for all ranks: each records its step, and between two steps they agree on a plan, or all stop.

A rank that plans alone may raise alone, if only its own budget cannot be met, and leave the others waiting in a
collective. Plans that differ make the fastest rank wait for the slowest. So ranks do not plan inside a hook: after the
recorded step each rank plans, all ranks exchange their plans, and ranks with equal steps follow one plan. torch
distributes the model. With a plan folder the next run follows these plans from its first step, if all ranks have
theirs; after that step the ranks tell each other whether it was as planned, and otherwise record anew.

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
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vdnn import _C
from vdnn.bytesize import format_bytes
from vdnn.errors import FormatError, RankError, RecomputeError, VdnnError
from vdnn.planning.budget import parse_budget
from vdnn.planning.catalogue import make_quick_planner
from vdnn.planning.simulate import simulate
from vdnn.runtime.machine.tensor_device import TensorDevice
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.recompute.rechecks import DEFAULT_ONE_IN
from vdnn.runtime.session.limits import Limits
from vdnn.runtime.session.offload import offload
from vdnn.runtime.session.plan_folders import path_of, plan_folder
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.plan_store import PlanFolder, TrainingIdentity, card_facts, refused, structure_of
from vdnn.runtime.steps.plan_table import PlanOrigin
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.step.plan import Plan
from vdnn.step.recording import Recording
from vdnn.step.stored_plans import Fact, StoredPlans, StoredRecording, StoredSizedPlan, StoredTable
from vdnn.step.timeline import Timeline

logger = logging.getLogger("vdnn")

_Sent = TypeVar("_Sent")


@dataclass(frozen=True, slots=True)
class Proposal:
    """The message of one rank to the others. `order` is a hash of its saves and uses; a `problem` stops all ranks."""

    order: str
    peak_bytes: int
    plan: Plan | None
    problem: str = ""


class TogetherSession(contextlib.AbstractContextManager["TogetherSession"]):
    """The context manager that offload_together returns. All ranks enter it and call step(), in the same order."""

    def __init__(
        self,
        planner: BudgetPlanner,
        warmup_steps: int,
        limit_s: float,
        options: dict[str, Any],
        stored: RankPlans | None = None,
    ) -> None:
        self._planner = planner
        self._stored = stored
        self._is_unconfirmed = False  # a stored plan that no step has followed yet
        self._warmup_steps = warmup_steps
        self._recorded_after = warmup_steps + 1
        self._limit_s = limit_s
        self._options = options
        self._group: Any = None
        self._steps = 0
        self.plan: Plan | None = None
        self.follows_stored = False  # the plan is that of an earlier run
        self.lines: list[str] = []  # about stored plans, for reports
        self.session: Session = self._recording_session()

    def __enter__(self) -> TogetherSession:
        # A separate gloo group on the host, with a time limit that does not apply to the training's collectives.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._limit_s))
        self.session.__enter__()
        if self._stored is not None:
            self._follow_stored(self._stored)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._stored is not None and self.follows_stored and isinstance(exception[1], RecomputeError):
            self._stored.forget()
        self.session.__exit__(*exception)

    def _recording_session(self) -> Session:
        return offload("vdnn-all", measure=True, warmup_steps=self._warmup_steps, **self._options)

    def _follow_stored(self, stored: RankPlans) -> None:
        """Follows the plan of an earlier run if each rank has one."""
        plan, sentence = stored.load()
        missing = _first(self._gathered(sentence if plan is None else ""))
        if missing is None:
            self._say(f"follows the stored plan of an earlier run: {stored.path}")
            self._enter_session(offload(plan=plan, **self._options))
            self.plan, self.follows_stored, self._is_unconfirmed = plan, True, True
        else:
            self._say(f"rank {missing[0]} follows no stored plan: {missing[1]}. All ranks record a step")

    def _confirm(self, stored: RankPlans) -> None:
        """Called after the first step under stored plans. If the step of any rank differed from its plan, all ranks
        record a step."""
        self._is_unconfirmed = False
        differing = _first(self._gathered(self.session._engine.steps.first_difference or ""))
        if differing is None:
            return
        self._say(f"the first step of rank {differing[0]} was not as its stored plan: {differing[1].rstrip('.')}")
        stored.forget()
        self._steps, self.plan, self.follows_stored = 0, None, False
        self._enter_session(self._recording_session())

    def _say(self, sentence: str) -> None:
        self.lines.append(sentence)
        logger.info("vdnn: %s.", sentence)

    def step(self) -> None:
        """Ends a step. After the recorded step the ranks agree on a plan and follow it from the next step on."""
        self.session.step()
        self._steps += 1
        if self._stored is not None and self._is_unconfirmed:
            self._confirm(self._stored)
        elif self._steps == self._recorded_after and not self.follows_stored:
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
        plan = chosen if fits else mine.plan
        if self._stored is not None:
            self._stored.store(recording, plan)
        return plan

    def _exchange(self, mine: Proposal) -> list[Proposal]:
        """Sends this rank's proposal and returns all of them, by rank. Raises on all ranks if one has a problem."""
        proposals = self._gathered(mine)
        for rank, proposal in enumerate(proposals):
            if proposal.problem:
                raise RankError(rank=rank, ranks=len(proposals), reason=proposal.problem)
        return proposals

    def _gathered(self, mine: _Sent) -> list[_Sent]:
        """Sends a value to all ranks, and returns what each sent, by rank. Raises RankError after the time limit."""
        sent: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(sent, mine, group=self._group)
        except RuntimeError as error:
            raise RankError(
                rank=dist.get_rank(),
                ranks=len(sent),
                reason=f"the others did not agree on a plan within {self._limit_s:g} s ({_first_line(error)})",
            ) from error
        return sent

    def _enter_session(self, session: Session) -> None:
        """Replaces the session, between two steps."""
        self.session.__exit__(None, None, None)
        self.session.close()
        self.session = session
        session.__enter__()

    def _follow(self, plan: Plan | None) -> None:
        if plan is None:
            return
        self.plan = plan
        self._enter_session(offload(plan=plan, **self._options))
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
    plans: str | os.PathLike[str] | None = None,
    model: torch.nn.Module | None = None,
    **options: Any,
) -> TogetherSession:
    """Makes a session on each rank of torch.distributed, which must be initialised, with the options of vdnn.offload.

    `budget` and `limits` apply to each rank. A rank that waits for the others' plans longer than `limit_s` raises.
    With `plans`, a folder, and the `model` that is trained, the next run follows the plans of this one from its first
    step on.
    """
    folder = path_of(plans)
    if folder is not None and model is None:
        raise ValueError("plans: the model tells whose plans are stored. Give model= as well.")
    if not dist.is_available() or not dist.is_initialized():
        raise VdnnError(
            "offload_together: torch.distributed is not initialised. Call torch.distributed.init_process_group first, "
            "or use vdnn.offload in a single process."
        )
    profile = device.profile if isinstance(device, VirtualMachine) else None
    wanted = None if budget is None else parse_budget(budget)
    planner = BudgetPlanner(make_quick_planner(policy), wanted, limits.host_bytes, profile)
    stored = None if folder is None or model is None else RankPlans(folder, planner, model, options, device)
    if model is not None and (folder is None or options.keys() & {"optimizer", "parameters"}):
        options["model"] = model
    return TogetherSession(planner, warmup_steps, limit_s, {**options, "device": device, "limits": limits}, stored)


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
    """Among the ranks whose steps equal this rank's, the plan of the one with the largest peak, the first of equals.

    This rank must have a plan."""
    order = proposals[rank].order
    plans = [(each.peak_bytes, each.plan) for each in proposals if each.order == order and each.plan is not None]
    return max(plans, key=lambda peak_and_plan: peak_and_plan[0])[1]


def _first(sentences: list[str]) -> tuple[int, str] | None:
    """The first rank that has something to say, and its sentence."""
    return next(((rank, sentence) for rank, sentence in enumerate(sentences) if sentence), None)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# The stored plan of one rank, which the ranks agreed on in an earlier run of the same training.
#
# The plan folder has a folder for each number of ranks, with one file for each rank. The file is named by the rank and
# by the same facts as the file of a session without ranks (vdnn/runtime/steps/plan_store.py). It contains the recorded
# step and the plan. The ranks decide together whether they follow their files.

_CHANGING = (  # options that change plans
    "recompute",
    "lossy",
    "tolerance",
    "min_bytes",
    "parameters",
    "gradients",
    "optimizer_on",
    "optimizer_step",
    "integrity",
)


class RankPlans:
    """The file of this rank for a training of `model`, planned by `planner` with the `options` of vdnn.offload."""

    def __init__(
        self, path: Path, planner: BudgetPlanner, model: torch.nn.Module, options: Mapping[str, Any], device: Any
    ) -> None:
        changing = {name: options.get(name) for name in _CHANGING}
        changing["offloaded optimizers"] = "optimizer" in options
        recheck, integrity = options.get("recheck", DEFAULT_ONE_IN), options.get("integrity", False)
        finds_faults = options.get("tolerance") is None and (recheck > 0 or integrity)
        self._may_recompute = finds_faults and (isinstance(device, TensorDevice) or _C.device_code_present())
        self._planner = planner
        ranks = dist.get_world_size()
        path /= f"{ranks}-ranks"
        found = plan_folder(path, planner, changing, finds_faults=finds_faults)
        self._folder: PlanFolder | None = None if found is None else replace(found, ranks=ranks)
        rank = Fact("rank", f"{dist.get_rank()} of {ranks}")
        facts = () if found is None else found.facts
        self._training = TrainingIdentity(*structure_of(model), (rank, *_card(device), *facts))
        self.path = path / self._training.file_name

    def load(self) -> tuple[Plan | None, str]:
        """The plan of an earlier run; None with a sentence that says why there is none."""
        if self._folder is None:
            return None, "the plan folder cannot be written"
        found = self._folder.load(self._training)
        if found.plans is None:
            return None, found.sentence
        try:
            plan = _only_plan(self.path, found.plans)
            self._planner.require_host(plan)
        except VdnnError as error:  # a file that contradicts itself, or a plan that this host has no memory for
            return None, refused(f"{error} The ranks plan anew.").sentence
        if not self._may_recompute and any(one.is_recomputed for one in plan.lifetimes):
            return None, f"the stored plan in {self.path} recomputes, and nothing would prove that at its first use"
        return plan, ""

    def store(self, recording: Recording, plan: Plan) -> None:
        """Replaces the plan of this rank. If that is not possible, a warning says so."""
        if self._folder is None:
            return
        sized_plan = StoredSizedPlan(0, plan, None, PlanOrigin.RECORDED.value, 0, False, ())
        table = StoredTable(False, False, (StoredRecording(0, True, False),), (sized_plan,))
        self._folder.store(self._training, StoredPlans((recording,), (table,), (0,)))

    def forget(self) -> None:
        """Removes the plan of this rank: it is not that of its steps, or gave a wrong value."""
        if self._folder is not None:
            self._folder.forget(self._training)


def _only_plan(path: Path, plans: StoredPlans) -> Plan:
    sized_plans = [sized_plan for table in plans.tables for sized_plan in table.plans]
    if len(sized_plans) != 1:
        raise FormatError(where=str(path), problem=f"expected the one plan of a rank, got {len(sized_plans)}.")
    return sized_plans[0].plan


def _card(device: Any) -> tuple[Fact, Fact]:
    if isinstance(device, TensorDevice):
        device = device.device
    if isinstance(device, _C.Device):
        name, total_bytes = device.info.name, device.info.total_bytes
    else:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, total_bytes = properties.name, properties.total_memory
    return card_facts(str(name), total_bytes)
