"""vdnn.offload, vdnn.keep and vdnn.paused: the functions that users call.

offload() checks its arguments, chooses the policies, and makes the Session. It refuses combinations that cannot work
before the first step runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vdnn import _C
from vdnn.bytesize import parse_bytes
from vdnn.errors import VdnnError
from vdnn.planning.budget import Budget, parse_budget
from vdnn.planning.catalogue import has_online, has_planner, make_planner, make_policy
from vdnn.planning.policies import OnlinePolicy, PlanPolicy
from vdnn.runtime.machine.gauges import CudaGauges, Gauges, VirtualGauges
from vdnn.runtime.machine.tensor_device import TensorDevice
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.recompute.codecs import LOSSLESS, check_codecs
from vdnn.runtime.recompute.rechecks import DEFAULT_ONE_IN
from vdnn.runtime.recompute.tolerance import check_tolerance
from vdnn.runtime.session.host_share import host_bytes_of_rank
from vdnn.runtime.session.session import Session, active_session, mark_to_keep
from vdnn.runtime.steps.options import Ways
from vdnn.runtime.steps.planner import BudgetPlanner
from vdnn.runtime.storage.transport import Transport, TransportOptions
from vdnn.step.plan import Plan


def offload(
    policy: str | OnlinePolicy | PlanPolicy | Plan = "auto",
    *,
    budget: int | str | None = None,
    device: str | _C.Device | TensorDevice | None = None,
    min_bytes: int | str = "1MiB",
    host_budget: int | str | None = None,
    offload_window: int | str = "256MiB",
    reload_window: int | str = "256MiB",
    warmup_steps: int = 1,
    measure: bool = False,
    integrity: bool = False,
    recompute: bool = True,
    codecs: Sequence[str] = (),
    tolerance: float | None = None,
    recheck: int = DEFAULT_ONE_IN,
) -> Session:
    """A session that offloads what autograd saves inside `with`.

    `policy` is a name of vdnn.planning.policies, a policy of your own, or a Plan to follow. `budget` is what the step
    may take of the device: "12GiB", "80%" of it, "min" for the least there is; None: what the device has. The first
    steps run under a policy that needs no recording and moves everything; one is recorded and planned, and from then
    on the plan is followed. "keep", "vdnn-all" and "vdnn-conv" without a budget decide at every save and plan nothing.
    `device` is "cuda", "sim" (tensors on the CPU, on a simulated device), a VirtualMachine, a native device to stand
    for the CPU's tensors, or None for whatever GPU the tensors are on. Where there is no clock and no count of memory
    ("sim", native devices) nothing can be planned: there "auto" moves everything. Saves smaller than `min_bytes` stay.
    `host_budget` caps pinned memory; without it the ranks of a node share what there is. The windows cap what copies in
    flight hold on the device. `measure`: after `warmup_steps` steps one is recorded (`session.recording`), and each is
    measured (`session.timeline`). `integrity`: what comes back is compared with what left. `recompute`: a plan may
    recompute what one cheap operation makes of something else that is saved, instead of moving it; masks it may keep as
    bits. `codecs` names a lossy codec that it may use besides: "bf16" or "fp8". `tolerance`: None recomputes bit for
    bit; 1e-6 also what comes out within a millionth of the largest magnitude in the value, each operation of which is
    named. `recheck`: one step in so many compares what is recomputed with what was discarded; 0: none.

        with vdnn.offload("vdnn-all") as session:
            model(x).sum().backward()
        print(session.report())
    """
    check_device(device)
    if type(warmup_steps) is not int or warmup_steps < 0:
        raise ValueError(f"warmup_steps: expected a number of steps, 0 or more, got {warmup_steps!r}.")
    if not isinstance(recompute, bool):
        raise TypeError(f"recompute: expected True or False, got {recompute!r}.")
    chosen = check_codecs(codecs)
    if chosen != LOSSLESS and not recompute:
        raise ValueError("codecs: with recompute=False a plan only offloads. Leave one of the two out.")
    limit = check_tolerance(tolerance)
    if type(recheck) is not int or recheck < 0:
        raise ValueError(f"recheck: expected a number of steps from one check to the next, or 0, got {recheck!r}.")
    if limit is not None and not recompute:
        raise ValueError("tolerance: recompute=False recomputes nothing. Leave one of the two out.")
    wanted = None if budget is None else parse_budget(budget)
    plan = policy if isinstance(policy, Plan) else None
    if plan is not None and wanted is not None:
        raise ValueError("budget: a plan has a budget of its own. Give one of the two.")
    if integrity and isinstance(device, TensorDevice) and device.fake:
        raise ValueError("integrity: tensors without data cannot be compared. Make the VirtualMachine with fake=False.")
    host_bytes = host_bytes_of_rank() if host_budget is None else _bytes_of("host_budget", host_budget)
    online, planner = _policies(policy, wanted, device, host_bytes or None)
    ways = None
    if plan is not None or planner is not None or measure:
        gauges_for = None
        if measure or planner is not None:
            _require_clock(device)
            gauges_for = functools.partial(_gauges, device)
        ways = Ways(gauges_for, warmup_steps, plan, planner, recompute, chosen)
    if ways is None and chosen != LOSSLESS:
        raise ValueError("codecs: only a plan uses codecs. Give a budget, a plan, or measure=True.")
    if ways is None and limit is not None and not online.recomputes:
        raise ValueError(
            "tolerance: this session recomputes nothing. Give a budget, a plan, measure=True, or the policy "
            "'recompute-all'."
        )
    options = TransportOptions(
        host_bytes,
        _bytes_of("offload_window", offload_window),
        _bytes_of("reload_window", reload_window),
        timed=ways is not None and ways.gauges_for is not None,
    )
    is_zero = min_bytes == 0 and not isinstance(min_bytes, bool)
    smallest = 0 if is_zero else _bytes_of("min_bytes", min_bytes)
    return Session(online, device, smallest, options, steps=ways, integrity=integrity, tolerance=limit, recheck=recheck)


def check_device(device: object) -> None:
    """Raises ValueError or TypeError unless a session can run on `device`."""
    if device in (None, "cuda", "sim") or isinstance(device, (_C.Device, TensorDevice)):
        return
    got = repr(device) if isinstance(device, str) else type(device).__name__
    kind = ValueError if isinstance(device, str) else TypeError
    raise kind(f"device: expected 'cuda', 'sim', a VirtualMachine or a device of the native core, got {got}.")


def _bytes_of(argument: str, size: int | str) -> int:
    """parse_bytes, with the name of the argument in its errors."""
    try:
        return parse_bytes(size)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}: {error}") from None


def _policies(
    policy: object, budget: Budget | None, device: object, host_bytes: int | None
) -> tuple[OnlinePolicy, BudgetPlanner | None]:
    """The online policy that decides at the saves, and the planner, or None if the session makes no plan."""
    if isinstance(policy, Plan):
        return make_policy("vdnn-all"), None
    if isinstance(policy, OnlinePolicy):
        planned: PlanPolicy | None = None if budget is None else make_planner("auto")
        online = policy
    elif isinstance(policy, PlanPolicy):
        planned, online = policy, make_policy("vdnn-all")
    else:
        online = make_policy(policy if has_online(policy) else "vdnn-all")  # type: ignore[arg-type]
        needs_none = has_online(policy) and budget is None  # type: ignore[arg-type]
        planned = None if needs_none or not has_planner(policy) else make_planner(policy)  # type: ignore[arg-type]
        if policy == "auto" and budget is None and not _has_clock(device):
            planned = None
    if planned is None:
        return online, None
    profile = device.profile if isinstance(device, VirtualMachine) else None
    if budget is not None and budget.nbytes is not None:
        budget.bytes_for(_device_bytes(device), 0)  # refuse a budget above the device's memory before the first step
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
    return isinstance(device, VirtualMachine) or (device in (None, "cuda") and torch.cuda.is_available())


def _require_clock(device: object) -> None:
    if device == "sim" or isinstance(device, _C.Device):
        raise VdnnError(
            "budgets and measure=True need a clock and a count of memory, which tensors on the CPU do not have. "
            "Use a GPU, or a vdnn.VirtualMachine as device."
        )


def _gauges(device: object, transport: Transport) -> Gauges:
    if isinstance(device, VirtualMachine):
        return VirtualGauges(device)
    return CudaGauges(transport.torch_device, transport.device)


def keep(what: torch.Tensor | torch.nn.Module) -> Any:
    """Marks a tensor's storage, or all that a module's forward saves, to stay on the device. Returns its argument."""
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
