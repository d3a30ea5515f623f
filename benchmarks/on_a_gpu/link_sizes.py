"""Part of `make gpu-proof`: measures the link between a GPU and its host, by the size of a block.

For each size: pinned memory to the host, to the device and in both directions at once; pageable memory in each
direction, as a plain `.to()` copies it; and the time to pin a block. The rate of long copies is the most that a copy
engine can reach, and busy engines are compared with it. `--device sim` uses the simulated device, to try the program.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn import _C
from vdnn.bytesize import format_bytes
from vdnn.hardware.link_probe import measure_link

SIZES = tuple(2**power for power in range(16, 29, 2))  # 64 KiB to 256 MiB
REPEATS = 5


@dataclass(frozen=True, slots=True)
class LinkRow:
    """The figures for blocks of one size. Pageable rates are None without a GPU."""

    block_bytes: int
    to_host_bytes_per_s: int
    to_device_bytes_per_s: int
    both_ways_bytes_per_s: int
    pageable_to_host_bytes_per_s: int | None
    pageable_to_device_bytes_per_s: int | None
    pinning_ns: int


@contextmanager
def _opened(device: str) -> Iterator[_C.Device]:
    native: _C.Device = _C.CudaDevice(0) if device == "cuda" else _C.SimDevice()
    try:
        yield native
    finally:
        native.close()


def _bytes_per_s(nbytes: int, copy: Callable[[], object]) -> int:
    """The rate of `copy` by the host's clock, which waits until the copy is complete."""
    taken_ns = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        begin_ns = time.perf_counter_ns()
        copy()
        torch.cuda.synchronize()
        taken_ns.append(time.perf_counter_ns() - begin_ns)
    return round(nbytes * 1e9 / statistics.median(taken_ns[1:]))


def measure_size(native: _C.Device, block_bytes: int) -> LinkRow:
    link = measure_link(native, block_bytes=block_bytes, repeats=REPEATS)
    to_host: int | None = None
    to_device: int | None = None
    if isinstance(native, _C.CudaDevice):
        on_device = torch.zeros(block_bytes, dtype=torch.uint8, device="cuda")
        on_host = torch.zeros(block_bytes, dtype=torch.uint8)
        to_host = _bytes_per_s(block_bytes, lambda: on_host.copy_(on_device))
        to_device = _bytes_per_s(block_bytes, lambda: on_device.copy_(on_host))
    return LinkRow(
        block_bytes,
        link.to_host_bytes_per_s,
        link.to_device_bytes_per_s,
        link.both_ways_bytes_per_s,
        to_host,
        to_device,
        link.pinning_ns,
    )


def render(device: str, rows: Sequence[LinkRow]) -> str:
    header = (
        "block",
        "to host GB/s",
        "to device",
        "both ways",
        "pageable to host",
        "pageable to device",
        "pinning ms",
    )
    cells = [
        (
            format_bytes(row.block_bytes),
            *(
                "-" if rate is None else f"{rate / 1e9:.2f}"
                for rate in (
                    row.to_host_bytes_per_s,
                    row.to_device_bytes_per_s,
                    row.both_ways_bytes_per_s,
                    row.pageable_to_host_bytes_per_s,
                    row.pageable_to_device_bytes_per_s,
                )
            ),
            f"{row.pinning_ns / 1e6:.3f}",
        )
        for row in rows
    ]
    return render_table(f"The link of {device}, medians of {REPEATS}", header, cells)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_a_gpu.link_sizes", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows there, line by line")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("link_sizes: torch sees no GPU here: --device sim tries the program without one.", file=sys.stderr)
        return 2
    progress = Progress("link_sizes", len(SIZES))
    rows: list[LinkRow] = []
    if options.json is not None:
        options.json.write_text("")
    with _opened(options.device) as native:
        for block_bytes in SIZES:
            progress.begin(format_bytes(block_bytes))
            rows.append(measure_size(native, block_bytes))
            if options.json is not None:
                with options.json.open("a") as lines:
                    lines.write(json.dumps(asdict(rows[-1])) + "\n")
        name = native.info.name
    progress.end()
    print(render(name, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
