"""Part of gpu-proof: the memory that libraries take for the time of each convolution and product of a training step.

Each distinct call of a step is measured once: the peak of requested bytes while it runs, less what is allocated behind
it. Beside it stands what a rehearsal counts for the card (vdnn/runtime/machine/workspaces.py). `--into PATH` writes a
copy of the card's profile that has the table: a rehearsal then takes the measured figure of a call in place of the
computed one. `--device sim` takes small networks on a virtual machine, to try the program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models import Workload, gpt2, resnet50, vgg16
from benchmarks.models.resnet import resnet
from benchmarks.text_table import render_table
from vdnn.bytesize import format_bytes
from vdnn.hardware import HardwareProfile, load_profile
from vdnn.hardware.profile_files import with_workspaces
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.machine.workspaces import workspace_key, workspace_of

_OPERATIONS = ("convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm")
_ON_A_GPU: dict[str, tuple[Callable[[], Workload], bool]] = {
    "VGG-16 (128)": (partial(vgg16, 128), False),
    "ResNet-50 (128)": (partial(resnet50, 128), False),
    "ResNet-50 AMP (128)": (partial(resnet50, 128), True),
    "GPT-2 AMP (4)": (partial(gpt2, 4), True),
}
_SMALL: dict[str, tuple[Callable[[], Workload], bool]] = {
    "ResNet, 2 blocks (4)": (partial(resnet, 4, (1, 1), 32), False)
}
_MOST_SHOWN = 12


@dataclass(frozen=True, slots=True)
class MeasuredWorkspace:
    """One call: its key, and the bytes that were taken for its time, measured and as a rehearsal counts them."""

    network: str
    call: str
    measured_bytes: int
    counted_bytes: int


class Memory:
    """The count of a device's memory. `peak` is that since the last `reset`."""

    def __init__(self, machine: VirtualMachine | None) -> None:
        self._machine = machine

    def reset(self) -> None:
        if self._machine is not None:
            self._machine.reset_peak()
        else:
            torch.cuda.reset_peak_memory_stats()

    def peak_and_current(self) -> tuple[int, int]:
        if self._machine is not None:
            return self._machine.peak_bytes, self._machine.allocated_bytes
        found = torch.cuda.memory_stats()
        return found["requested_bytes.all.peak"], found["requested_bytes.all.current"]


class WorkspaceMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, measures each distinct call of the operations once."""

    def __init__(self, network: str, memory: Memory, profile: HardwareProfile) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._network, self._memory, self._profile = network, memory, profile
        self.rows: dict[str, MeasuredWorkspace] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        key = workspace_key(name, args) if name in _OPERATIONS else None
        if key is None or key in self.rows:
            return func(*args, **(kwargs or {}))
        self._memory.reset()
        out = func(*args, **(kwargs or {}))
        peak, current = self._memory.peak_and_current()
        counted = workspace_of(self._profile, func, args, out)
        self.rows[key] = MeasuredWorkspace(
            self._network, key, max(0, peak - current), 0 if counted is None else counted.nbytes
        )
        return out


def measured(
    name: str, make: Callable[[], Workload], *, autocast: bool, profile: HardwareProfile, on_gpu: bool
) -> list[MeasuredWorkspace]:
    """The rows of one network, from the second of two steps: a library plans in the first."""
    with contextlib.ExitStack() as stack:
        machine = None if on_gpu else stack.enter_context(VirtualMachine(profile, fake=False, workspaces=True))
        with torch.device("cuda") if on_gpu else contextlib.nullcontext():
            model, inputs, loss = make()
        for turn in range(2):
            meter = WorkspaceMeter(name, Memory(machine), profile)
            with meter if turn else contextlib.nullcontext(), _cast(on_gpu, autocast):
                value = loss(model(*inputs))
            with meter if turn else contextlib.nullcontext():
                value.backward()  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=True)
            del value
    return list(meter.rows.values())


@contextlib.contextmanager
def _cast(on_gpu: bool, enabled: bool) -> Iterator[None]:
    with torch.autocast("cuda" if on_gpu else "cpu", torch.bfloat16, enabled=enabled):
        yield


def _source(on_gpu: bool) -> str:
    if not on_gpu:
        return (
            f"benchmarks/on_a_gpu/workspace_table.py on a virtual machine: not a measurement; torch {torch.__version__}"
        )
    cudnn: Any = torch.backends.cudnn
    card = torch.cuda.get_device_name()
    return f"benchmarks/on_a_gpu/workspace_table.py on {card}, torch {torch.__version__}, cuDNN {cudnn.version()}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_a_gpu.workspace_table", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--hardware", default="h200", help="the profile of the card")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows there, line by line")
    parser.add_argument("--into", type=Path, metavar="PATH", help="write a copy of the profile with the table there")
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("workspace_table: torch sees no GPU here: --device sim tries the program without one.", file=sys.stderr)
        return 2
    profile = load_profile(options.hardware)
    rows: list[MeasuredWorkspace] = []
    for name, (make, autocast) in (_ON_A_GPU if on_gpu else _SMALL).items():
        rows += measured(name, make, autocast=autocast, profile=profile, on_gpu=on_gpu)
        if options.json is not None:
            options.json.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    if options.into is not None:
        table = {row.call: row.measured_bytes for row in rows}
        options.into.write_text(with_workspaces(options.hardware, table, _source(on_gpu)))
    shown = sorted(rows, key=lambda row: -max(row.measured_bytes, row.counted_bytes))[:_MOST_SHOWN]
    cells = [
        (row.network, row.call, format_bytes(row.measured_bytes), format_bytes(row.counted_bytes)) for row in shown
    ]
    above = sum(row.measured_bytes > row.counted_bytes for row in rows)
    remark = f"{len(rows)} calls; {above} of them take more than a rehearsal counts. The {len(shown)} largest."
    print(render_table("Workspaces of libraries", ("network", "call", "measured", "counted"), cells, [remark]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
