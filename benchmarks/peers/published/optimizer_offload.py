"""Megatron-Bridge's optimizer offload, by share: published, as a schedule, and vdnn at the same memory.

Qwen3-30B-A3B on 16 H100s (TP 2, PP 2, EP 4): `skills/nemo-mbridge-perf-cpu-offloading/card.yaml` of NVIDIA-NeMo/
Megatron-Bridge at 067f987d. The distributed optimizer gives each card a sixteenth of the 30.53e9 parameters. What the
published rows save, 3.8 GB for each quarter, is eight bytes for each of them: two moments in float32.

The step without offload is the published one. Bridge's way (HybridDeviceOptimizer) copies gradients in float32 to the
host, steps there, and copies parameters back, with nothing beside it; with `overlap` the copies run beside the step on
the CPU. vdnn keeps the moments on the host and brings them to the card for its step: its plan is that of
auto_placement, which has nothing else to move here. Eight cards share the memory of two sockets.
"""

from __future__ import annotations

from typing import NamedTuple

from vdnn.errors import BudgetError
from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.training.auto_placement import auto_placement
from vdnn.planning.training.simulate_cycle import TrainingStep
from vdnn.planning.training.training import Training, TrainingMachine, Unit

SOURCE = "NVIDIA-NeMo/Megatron-Bridge, skills/nemo-mbridge-perf-cpu-offloading/card.yaml at 067f987d"
PARAMETERS = 30_530_000_000 // 16  # of one card's optimizer
BASE_MS, BASE_BYTES = 996.0, round(47.2e9)
WHY = "they are those of the host's memory, and how many cores step for each card is not stated"
_UNITS = 24  # a pipeline stage's layers
_MOMENTS, _GRADIENT, _STEP = 8, 4, 28  # bytes a parameter
_CARDS_OF_A_SOCKET = 4


class Published(NamedTuple):
    """A row. `saved` is in GB."""

    share: float
    step_ms: float
    saved_gb: float
    overlaps: bool = False


ROWS = (
    Published(0.25, 1871, 3.8),
    Published(0.5, 2484, 7.6),
    Published(0.75, 3187, 11.6),
    Published(1.0, 4189, 15.3),
    Published(1.0, 3877, 15.3, overlaps=True),
)


def machine() -> TrainingMachine:
    """An H100 and its part of the host."""
    profile = load_profile("h100")
    host = profile.host
    return TrainingMachine(
        "h100",
        profile_costs(profile),
        host["memory_bytes"],
        host["memory_bytes_per_s"] / _CARDS_OF_A_SOCKET,
        host["step_bytes_per_s"] / _CARDS_OF_A_SOCKET,
    )


def saved_bytes(row: Published) -> int:
    return round(row.share * PARAMETERS * _MOMENTS)


def bridge_ms(row: Published) -> float:
    """The step with a share of the optimizer on the CPU."""
    here = machine()
    offloaded = row.share * PARAMETERS
    copies_s = offloaded * _GRADIENT / here.link.to_host_bytes_per_s + offloaded * 4 / here.link.to_device_bytes_per_s
    stepping_s = offloaded * _STEP / here.cpu_bytes_per_s
    return BASE_MS + 1e3 * (max(copies_s, stepping_s) if row.overlaps else copies_s + stepping_s)


def vdnn_step(row: Published) -> TrainingStep:
    """The step of vdnn's plan at the memory of that row, or at the least that it needs: one slice of state more."""
    at_most = BASE_BYTES - saved_bytes(row)
    try:
        return auto_placement(training(), machine(), at_most)
    except BudgetError:
        return auto_placement(training(), machine(), at_most + training().units[0].state_bytes + (1 << 20))


def training() -> Training:
    """One card's step. Only the moments can leave."""
    part = PARAMETERS // _UNITS
    profile = load_profile("h100")
    step_ns = round(part * _STEP / (profile.memory_bytes_per_s * profile.bandwidth_efficiency) * 1e9)
    computing_ns = round(BASE_MS * 1e6) // _UNITS - step_ns
    unit = Unit(
        name="layer",
        weight_bytes=0,
        frozen_bytes=0,
        gradient_bytes=1,
        state_bytes=part * _MOMENTS,
        saved_bytes=0,
        boundary_bytes=0,
        forward_ns=computing_ns // 3,
        backward_ns=computing_ns - computing_ns // 3,
        forward_transient_bytes=0,
        backward_transient_bytes=0,
        step_ns=step_ns,
        host_step_bytes=part * _STEP,
    )
    others = BASE_BYTES - _UNITS * (unit.state_bytes + unit.gradient_bytes)
    return Training("a sixteenth of Qwen3-30B-A3B", (unit,) * _UNITS, fixed_bytes=others)
