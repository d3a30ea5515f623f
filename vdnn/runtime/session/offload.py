"""vdnn.offload, vdnn.keep and vdnn.paused: the functions that users call.

offload() checks its arguments, chooses the policies, and makes the Session. It refuses combinations that cannot work
before the first step runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

import torch

from vdnn import _C
from vdnn.bytesize import exact_bytes
from vdnn.planning.budget import Budget, parse_budget
from vdnn.planning.catalogue import has_online, has_planner, make_policy, make_quick_planner
from vdnn.planning.policies import OnlinePolicy, PlanPolicy
from vdnn.runtime.machine.gauges import CudaGauges, Gauges, VirtualGauges
from vdnn.runtime.machine.tensor_device import TensorDevice
from vdnn.runtime.machine.torch_allocator import allocator_without_count
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.recompute.codecs import LOSSLESS, LOSSY
from vdnn.runtime.recompute.rechecks import DEFAULT_ONE_IN
from vdnn.runtime.recompute.tolerance import check_tolerance
from vdnn.runtime.session.as_needed import AsNeeded, check_plan_of
from vdnn.runtime.session.engine import EngineOptions
from vdnn.runtime.session.limits import Limits, bytes_of, host_bytes_of_rank
from vdnn.runtime.session.managed_optimizers import (
    defers_steps,
    parameters_of,
    require_gradients_can_leave,
    states_of,
    steps_on_cpu,
)
from vdnn.runtime.session.marked import mark_to_keep
from vdnn.runtime.session.plan_folders import path_of, plan_folder
from vdnn.runtime.session.session import Session, active_session
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.runtime.steps.steps import StepOptions
from vdnn.runtime.storage.transport import Transport, TransportOptions
from vdnn.step.plan import Plan
from vdnn.step.training_plan import TrainingPlan
from vdnn.user_warnings import warn

# What to do where torch's allocator counts no requested bytes.
_COUNTED = "Use torch's native allocator (PYTORCH_ALLOC_CONF=backend:native)"


def offload(
    policy: str | OnlinePolicy | PlanPolicy = "auto",
    *,
    budget: int | str | None = None,
    plan: Plan | TrainingPlan | None = None,
    plans: str | os.PathLike[str] | None = None,
    device: str | TensorDevice | None = None,
    recompute: bool = True,
    lossy: Literal["bf16", "fp8"] | None = None,
    tolerance: float | None = None,
    recheck: int = DEFAULT_ONE_IN,
    integrity: bool = False,
    measure: bool = False,
    warmup_steps: int = 1,
    min_bytes: int | str = "1MiB",
    limits: Limits = Limits(),  # noqa: B008  # it is frozen
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    optimizer_on: Literal["device", "cpu"] = "device",
    optimizer_step: Literal["immediate", "deferred"] = "immediate",
    parameters: Literal["frozen", "all"] | None = None,
    gradients: bool | None = None,
) -> Session:
    """Returns a session: inside ``with``, it offloads what autograd saves.

    The first steps run under a guard, which moves what does not fit the budget. Then one step is recorded and planned
    for the budget, and later steps that are no larger follow the plan. Where there is neither a clock nor a count of
    memory (``device="sim"``), nothing can be planned, and ``"auto"`` moves everything.

    Args:
        policy: The name of a policy (docs/policies.md), or a policy of your own. ``"keep"``, ``"vdnn-all"``,
            ``"vdnn-conv"`` and ``"recompute-all"`` without a budget decide at the saves and plan nothing.
        budget: Device memory that a step may take: ``"12GiB"``, a share of the device (``"80%"``), a number of bytes,
            or ``"min"`` for the least that any plan reaches. Default: the memory that the device has.
        plan: A plan to follow, such as ``Plan.load("plan.json")``. It replaces ``policy`` and ``budget``. The plan of a
            whole training, ``vdnn.plan_training(...).plan``, says which parameters, gradients and states of ``model``
            and ``optimizer`` stay from the first step on; activations are planned for the rest of its budget.
        plans: A folder in which plans outlive the process: the next run of the same training follows them from its
            first step on, and records and plans nothing (docs/sessions.md). Default: plans end with the process.
        device: ``"cuda"``; ``"sim"`` for tensors on the CPU and a simulated device; a :class:`vdnn.VirtualMachine`.
            Default: the GPU that the tensors are on.
        recompute: Whether a plan may recompute a storage from others that are saved, instead of moving it, and pack
            masks as bits. Gradients stay the same bit for bit.
        lossy: A lossy codec that a plan may use as well. It changes gradients (docs/recompute.md has the error bounds).
        tolerance: ``None`` recomputes only values that come out bit for bit. ``1e-6`` also allows differences of at
            most a millionth of the largest magnitude in the value; each such operation is named in the log.
        recheck: One step in this many compares recomputed values with hashes of the discarded ones. ``0`` never
            compares.
        integrity: Whether every storage is hashed before it is offloaded, and compared after it is reloaded.
        measure: Whether to record a step (``session.recording``) and to measure each step (``session.timeline``), with
            or without a plan.
        warmup_steps: Steps before the one that is recorded. With a budget they are planned from, too, until then.
        min_bytes: Tensors whose storage is smaller stay on the device.
        limits: Further limits of memory, such as ``vdnn.Limits(host_budget="64GiB")``, that few trainings need.
        model: The model that ``optimizer`` trains. The session checks that its parameters are the optimizer's. Their
            gradients, and then the parameters, leave the device too if the budget has no room for them. ``parameters``
            needs it.
        optimizer: The optimizer, or several, whose state lives on the host between steps, as far as that makes the step
            shortest under the budget. Its own ``step`` runs on the device on slices of its parameters, with the same
            bits (docs/training-state.md).
        optimizer_on: ``"cpu"`` runs the step of ``optimizer`` on the CPU. Only gradients and parameters then cross the
            link; results differ in the last bits.
        optimizer_step: ``"deferred"`` updates each parameter just ahead of its next use in a forward pass, so that the
            copies of the state overlap with it. Results are the same bit for bit; whatever reads a parameter, its
            gradient or its state finishes its step first.
        parameters: ``"frozen"`` keeps the parameters of ``model`` that need no gradient on the host, ``"all"`` also
            those that ``optimizer`` trains, with their gradients, as far as that makes the step shortest under the
            budget. Each comes to the device ahead of its module, ahead of its use in backward, and for its step
            (docs/training-state.md). Default: parameters leave only if ``model``, ``optimizer`` and a budget are given,
            and the budget has no room for them.
        gradients: Whether gradients of ``optimizer``'s parameters are offloaded as soon as backward has made them.
            Reading ``parameter.grad`` brings one back, and so do clipping and the step. Default: as for ``parameters``.
            ``False``: the session does not offload gradients or parameters by itself, even if the budget has no room
            for them.

    Raises:
        ValueError, TypeError: An argument is wrong, or two arguments contradict each other. ``budget`` and ``measure``
            need a device with a clock and a count of memory.

    Example:
        .. code-block:: python

            with vdnn.offload(budget="12GiB") as session:
                for x, y in loader:
                    criterion(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            print(session.report())
    """
    check_device(device)
    if type(warmup_steps) is not int or warmup_steps < 0:
        raise ValueError(f"warmup_steps: expected a number of steps, 0 or more, got {warmup_steps!r}.")
    if not isinstance(recompute, bool):
        raise TypeError(f"recompute: expected True or False, got {recompute!r}.")
    codecs = _codecs_with(lossy)
    if lossy is not None and not recompute:
        raise ValueError("lossy: with recompute=False a plan only offloads. Leave one of the two out.")
    limit = check_tolerance(tolerance)
    if type(recheck) is not int or recheck < 0:
        raise ValueError(f"recheck: expected a number of steps from one check to the next, or 0, got {recheck!r}.")
    if limit is not None and not recompute:
        raise ValueError("tolerance: recompute=False recomputes nothing. Leave one of the two out.")
    wanted = None if budget is None else parse_budget(budget)
    _check_plan(plan, policy, wanted)
    whole, plan = (plan, None) if isinstance(plan, TrainingPlan) else (None, plan)
    if whole is not None:
        wanted = parse_budget(whole.budget_bytes)
    folder = path_of(plans)
    if integrity and isinstance(device, TensorDevice) and device.fake:
        raise ValueError("integrity: tensors without data cannot be compared. Make the VirtualMachine with fake=False.")
    if not isinstance(limits, Limits):
        raise TypeError(f"limits: expected a vdnn.Limits, got {type(limits).__name__}.")
    host_bytes = host_bytes_of_rank() if limits.host_bytes is None else limits.host_bytes
    online, planner = _policies(policy, wanted, device, host_bytes or None, is_planned=plan is not None)
    if folder is not None and planner is None:
        way_out = "Give a budget as well" if plan is None else "Give a budget instead of plan="
        raise ValueError(f"plans: this session makes no plans that could be stored. {way_out}.")
    steps = None
    if plan is not None or planner is not None or measure:
        gauges_for = None
        if measure or planner is not None:
            _require_clock(device)
            gauges_for = functools.partial(_gauges, device)
        steps = StepOptions(gauges_for, measure, warmup_steps, plan, planner, recompute, codecs)
    uncounted = _uncounted(device)
    if steps is None and policy == "auto" and uncounted is not None:
        warn(
            f"nothing is planned, and everything is offloaded: torch's allocator {uncounted!r} does not count "
            f"requested bytes. {_COUNTED}."
        )
    if steps is None and lossy is not None:
        raise ValueError("lossy: only a plan uses codecs. Give a budget, a plan, or measure=True.")
    if steps is None and limit is not None and not online.recomputes:
        raise ValueError(
            "tolerance: this session recomputes nothing. Give a budget, a plan, measure=True, or the policy "
            "'recompute-all'."
        )
    if steps is None and online.may_offload and (online.is_repeatable or online.recomputes):
        steps = StepOptions(recomputes=online.recomputes, online=online)
    budget_bytes = None if wanted is None else wanted.fixed_bytes(_device_bytes(device))
    options = TransportOptions(
        host_bytes,
        *limits.windows(budget_bytes),
        timed=steps is not None and steps.gauges_for is not None,
    )
    everything = min_bytes == 0 and not isinstance(min_bytes, bool)
    least = 0 if everything else bytes_of("min_bytes", min_bytes)
    managed = parameters_of(model, parameters, optimizer)
    states = states_of(model, optimizer, has_parameters=managed is not None)
    on_cpu = steps_on_cpu(optimizer_on, device, states)
    require_gradients_can_leave(gradients, states, on_cpu=on_cpu)
    defers = defers_steps(optimizer_step, states, on_cpu=on_cpu, parameters=parameters)
    is_open = parameters is None and gradients is None and not on_cpu and not defers
    has_budget = planner is not None and not planner.wants_the_least
    if whole is not None:
        if model is None or not states or not is_open:
            raise ValueError(
                "plan: it says what leaves of a model and its optimizer. Give model= and optimizer= as well, and no "
                "other options of what leaves."
            )
        check_plan_of(whole, model)
    as_needed = AsNeeded(model, states, whole) if is_open and has_budget and model is not None and states else None
    gradients = bool(gradients) or (parameters == "all" and not on_cpu)
    if steps is not None and planner is not None and folder is not None:
        changing = {
            "recompute": recompute,
            "lossy": lossy,
            "tolerance": limit,
            "min_bytes": exact_bytes(least),
            "parameters": parameters,
            "gradients": gradients,
            "offloaded optimizers": len(states),
            "optimizer_on": optimizer_on,
            "optimizer_step": optimizer_step,
        }
        finds_faults = limit is None and (recheck > 0 or integrity)
        steps = replace(steps, folder=plan_folder(folder, planner, changing, finds_faults=finds_faults))
    engine = EngineOptions(online, device, least, options, steps, integrity, limit, recheck, managed is not None)
    make = functools.partial(
        Session,
        optimizer_states=states,
        parameters=managed,
        steps_on_cpu=on_cpu,
        gradients=gradients,
        defers_steps=defers,
        as_needed=as_needed,
    )
    if planner is None:
        return make(engine, None)
    named = policy if isinstance(policy, str) else id(policy)
    learns = wanted, recompute, lossy, limit, recheck, integrity, measure, warmup_steps, least, limits, folder
    on = None if isinstance(device, TensorDevice) else device  # which keeps engines of its own
    return make(engine, (named, on, *learns, parameters, gradients, defers, as_needed is not None, whole))


def _codecs_with(lossy: object) -> tuple[str, ...]:
    if lossy is None:
        return LOSSLESS
    if lossy not in LOSSY:
        raise ValueError(f"lossy: expected {' or '.join(map(repr, LOSSY))}, or None, got {lossy!r}.")
    return (*LOSSLESS, str(lossy))


def _check_plan(plan: object, policy: object, budget: Budget | None) -> None:
    if isinstance(policy, Plan):
        raise TypeError("policy: expected a name or a policy, got a Plan: give it as plan=.")
    if plan is None:
        return
    if not isinstance(plan, (Plan, TrainingPlan)):
        raise TypeError(f"plan: expected a Plan, got {type(plan).__name__}; Plan.load reads one from a file.")
    if budget is not None:
        raise ValueError("budget: a plan has a budget of its own. Give one of the two.")
    if policy != "auto":
        raise ValueError("policy: a plan is followed as it is. Give one of the two.")


def check_device(device: object) -> None:
    """Raises ValueError or TypeError unless a session can run on `device`."""
    if device in (None, "cuda", "sim") or isinstance(device, (_C.Device, TensorDevice)):
        return
    got = repr(device) if isinstance(device, str) else type(device).__name__
    kind = ValueError if isinstance(device, str) else TypeError
    raise kind(f"device: expected 'cuda', 'sim', a VirtualMachine or a device of the native core, got {got}.")


def _policies(
    policy: object, budget: Budget | None, device: object, host_bytes: int | None, *, is_planned: bool
) -> tuple[OnlinePolicy, BudgetPlanner | None]:
    """The online policy that decides at the saves, and the planner, or None if the session makes no plan."""
    if is_planned:
        return make_policy("vdnn-all"), None
    if isinstance(policy, OnlinePolicy):
        planned: PlanPolicy | None = None if budget is None else make_quick_planner("auto")
        online = policy
    elif isinstance(policy, PlanPolicy):
        planned, online = policy, make_policy("vdnn-all")
    else:
        online = make_policy(policy if has_online(policy) else "vdnn-all")  # type: ignore[arg-type]
        needs_none = has_online(policy) and budget is None  # type: ignore[arg-type]
        planned = None if needs_none or not has_planner(policy) else make_quick_planner(policy)  # type: ignore[arg-type]
        if policy == "auto" and budget is None and not _has_clock(device):
            planned = None
    if planned is None:
        return online, None
    profile = device.profile if isinstance(device, VirtualMachine) else None
    return online, BudgetPlanner(planned, budget, host_bytes, profile)


def _device_bytes(device: object) -> int | None:
    if isinstance(device, VirtualMachine):
        return device.profile.memory_bytes
    if isinstance(device, _C.Device):
        return device.info.total_bytes
    if device in (None, "cuda") and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return None


def _has_clock(device: object) -> bool:
    """True if the device has a clock and a count of memory."""
    is_cuda = device in (None, "cuda") and torch.cuda.is_available()
    return isinstance(device, VirtualMachine) or (is_cuda and _uncounted(device) is None)


def _uncounted(device: object) -> str | None:
    """The name of the allocator of a GPU that does not count requested bytes."""
    return allocator_without_count() if device in (None, "cuda") and torch.cuda.is_available() else None


def _require_clock(device: object) -> None:
    if device == "sim" or isinstance(device, _C.Device):
        raise ValueError(
            "budgets and measure=True need a clock and a count of memory, which tensors on the CPU do not have. "
            "Use a GPU, or a vdnn.VirtualMachine as device."
        )
    uncounted = _uncounted(device)
    if uncounted is not None:
        raise ValueError(
            f"budgets and measure=True need a count of requested bytes, which torch's allocator {uncounted!r} does not "
            f"have. {_COUNTED}, or a policy without a budget, such as 'vdnn-all'."
        )


def _gauges(device: object, transport: Transport) -> Gauges:
    if isinstance(device, VirtualMachine):
        return VirtualGauges(device)
    return CudaGauges(transport.torch_device, transport.device)


_Kept = TypeVar("_Kept", bound=torch.Tensor | torch.nn.Module)


def keep(what: _Kept) -> _Kept:
    """Marks something to stay on the device, and returns it.

    Args:
        what: A tensor, whose storage stays; or a module, and then whatever is saved inside its forward.
    """
    if not isinstance(what, (torch.nn.Module, torch.Tensor)):
        raise TypeError(f"keep: expected a tensor or a module, got {type(what).__name__}.")
    mark_to_keep(what)
    return what


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Saves on this thread stay on the device inside this context. Without a session it does nothing."""
    session = active_session()
    if session is None:
        yield
        return
    with session.paused():
        yield
