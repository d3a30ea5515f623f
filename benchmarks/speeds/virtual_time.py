"""The time of a published step on a virtual machine of its card, without data and with everything kept.

The step is rehearsed as `vdnn plan` would rehearse it, by the same prices of operations. `plain` leaves out the figures
by class of operation: then a card has one efficiency of arithmetic and one of its memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.models.workload import Workload
from benchmarks.speeds.bert_programs import ApexO2, BertAdam
from benchmarks.speeds.networks import NETWORKS
from benchmarks.speeds.rows import Row
from vdnn.hardware import HardwareProfile, HostFigures, load_profile
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.rehearsal import OPTIMIZERS
from vdnn.runtime.rehearsal.stage import stage

Optimizer = torch.optim.Optimizer | BertAdam | ApexO2
_OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {**OPTIMIZERS, "bert_adam": BertAdam, "apex_o2": ApexO2}


def step_ns(row: Row, *, plain: bool = False) -> int:
    """The virtual time of the second step, or of its issue by the host, if the profile knows one and that is longer.
    The first step makes the optimizer's state."""
    profile = load_profile(row.card)
    host = None if plain else HostFigures.of(profile)
    if plain:
        profile = replace(profile, efficiency={}, fill_ns={}, tile_overhead={}, sources=_sources_of_peaks(profile))
    with VirtualMachine(profile, host=host) as machine, stage(machine), _precision_of(row):
        workload = NETWORKS[row.network](row.batch)
        if row.channels_last:
            inputs = tuple(one.to(memory_format=torch.channels_last) for one in workload.inputs)
            workload = workload._replace(inputs=inputs)
            workload.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if row.optimizer == "apex_o2":
            workload.model.half()
        optimizer = _OPTIMIZERS[row.optimizer](workload.model.parameters()) if row.optimizer else None
        _step(workload, optimizer, row)
        begin_ns, issued_ns = machine.now_ns, machine.issued_ns
        _step(workload, optimizer, row)
        return max(machine.now_ns - begin_ns, machine.issued_ns - issued_ns)


def _step(workload: Workload, optimizer: Optimizer | None, row: Row) -> None:
    is_autocast = row.precision == "float16" and row.optimizer != "apex_o2"
    with torch.autocast("cuda", torch.float16, enabled=is_autocast):
        out = workload.model(*workload.inputs)
        loss = workload.loss(out.float() if row.optimizer == "apex_o2" else out)
    loss.backward()  # type: ignore[no-untyped-call]
    if optimizer is not None:
        optimizer.step()
    workload.model.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _precision_of(row: Row) -> Iterator[None]:
    """In a row of "tf32", products and convolutions of float32 run on tensor cores; in others they do not."""
    cudnn: Any = torch.backends.cudnn
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "tf32" if row.precision == "tf32" else "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _sources_of_peaks(profile: HardwareProfile) -> dict[str, str]:
    by_class = ("efficiency.", "fill_ns.", "tile_overhead.")
    return {name: source for name, source in profile.sources.items() if not name.startswith(by_class)}
