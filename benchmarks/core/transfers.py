"""`make bench`: the costs and gains of transfers on the simulated device, as four tables, in five to ten seconds.

No GPU is used. The first two tables time this machine and differ from run to run; the last two are computed and are the
same everywhere. `--json PATH` writes the figures with units in their names, `--quick` takes fewer repeats.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.core.allocation_sequences import FLOAT32_BYTES, repeated
from benchmarks.core.bookkeeping import Bookkeeping, measure_all_bookkeeping
from benchmarks.core.data_path import DataPath, measure_data_path
from benchmarks.core.pool_replay import PoolFigures, measure_pool
from benchmarks.core.power_of_two_cache import pinned_by_cache_bytes
from benchmarks.core.vgg16 import CONVOLUTIONS
from benchmarks.core.virtual_step import FLOP_PER_S, PROFILE, StepFigures, measure_steps
from benchmarks.text_table import render_table
from vdnn.bytesize import format_bytes

BLOCK_BYTES = (64 * 2**10, 2**20, 16 * 2**20, 64 * 2**20)
BATCH = 64
PREAMBLE = """\
vdnn: transfers on the SIMULATED device. Threads and ordinary memory of this CPU stand for a GPU
and its link. No GPU was used, and nothing below says how fast a GPU or its link is."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of all four tables. Times of tables 1 and 2 are measured, those of table 3 virtual."""

    data_path: list[DataPath]
    bookkeeping: list[Bookkeeping]
    steps: list[StepFigures]
    pool: list[PoolFigures]


def measure(*, quick: bool) -> Figures:
    repeats, chunks = (5, 40) if quick else (41, 400)
    return Figures(
        data_path=[measure_data_path(block_bytes, repeats) for block_bytes in BLOCK_BYTES],
        bookkeeping=measure_all_bookkeeping(chunks),
        steps=measure_steps(BATCH),
        pool=measure_pool(),
    )


def render(figures: Figures) -> str:
    tables = [
        PREAMBLE,
        render_data_path(figures.data_path),
        render_bookkeeping(figures.bookkeeping),
        render_steps(figures.steps),
        render_pool([pool_of(figures.steps[-1]), *figures.pool]),
    ]
    return "\n\n".join(tables)


def render_data_path(rows: Sequence[DataPath]) -> str:
    header = ("block", "blocks", "memcpy GB/s", "offload GB/s", "of memcpy", "reload GB/s", "of memcpy")
    cells = [
        (
            format_bytes(row.block_bytes),
            str(row.blocks),
            f"{row.memcpy_bytes_per_s / 1e9:.2f}",
            f"{row.offload_bytes_per_s / 1e9:.2f}",
            f"{row.offload_ratio:.2f} x",
            f"{row.reload_bytes_per_s / 1e9:.2f}",
            f"{row.reload_ratio:.2f} x",
        )
        for row in rows
    ]
    remark = (
        "Measured: real bytes through TransferQueue and PinnedPool, and memcpy of the same bytes in turn "
        "with them; medians. Small blocks are all in flight at once."
    )
    return render_table("1. Data path", header, cells, [remark])


def render_bookkeeping(rows: Sequence[Bookkeeping]) -> str:
    header = ("transfer", "in flight", "offload + release us", "reload + wait us")
    cells = [
        (
            f"{format_bytes(row.block_bytes)}, {row.kind}",
            str(row.in_flight),
            f"{row.offload_ns / 1e3:.2f}",
            f"{row.reload_ns / 1e3:.2f}",
        )
        for row in rows
    ]
    remark = "Measured: host time for one transfer, called from Python, where no bytes move; medians."
    return render_table("2. Bookkeeping", header, cells, [remark])


def render_steps(rows: Sequence[StepFigures]) -> str:
    header = ("feature maps", "step ms", "stall ms", "serial ms", "hidden", "offload GiB", "reload GiB", "peak GiB")
    cells = [
        (
            row.way,
            f"{row.step_ns / 1e6:.1f}",
            f"{row.stall_ns / 1e6:.1f}",
            f"{row.serial_ns / 1e6:.1f}",
            hidden(row),
            f"{row.offloaded_bytes / 2**30:.2f}",
            f"{row.reloaded_bytes / 2**30:.2f}",
            f"{row.peak_bytes / 2**30:.2f}",
        )
        for row in rows
    ]
    remark = (
        f"Computed in virtual time on the profile {PROFILE.name}: 13 convolutions in float32, each its FLOP at "
        f"{FLOP_PER_S / 1e12:.1f} TFLOP/s, its backward twice that; link {PROFILE.to_host_bytes_per_s / 1e9:.1f} GB/s "
        f"each way, {PROFILE.duplex_bytes_per_s / 1e9:.1f} both together. Serial: compute and copies one after the "
        "other; hidden: the part of the copies that "
        "ran beside compute. One map, 1 GiB, 2 GiB out: sources held while their copies run; 1, 2 ahead: "
        "maps in flight to the device before a convolution needs them. Peak: feature maps on the device."
    )
    return render_table(f"3. A step of VGG-16, batch {BATCH}", header, cells, [remark])


def hidden(row: StepFigures) -> str:
    copying_ns = row.serial_ns - row.compute_ns
    if copying_ns == 0:
        return "-"
    return f"{(row.serial_ns - row.step_ns) / copying_ns:.0%}"


def render_pool(rows: Sequence[PoolFigures]) -> str:
    header = ("host memory for", "requested GiB", "pool GiB", "ratio", "2^n cache GiB", "ratio")
    cells = [
        (
            row.sequence,
            f"{row.requested_peak_bytes / 2**30:.3f}",
            f"{row.pinned_peak_bytes / 2**30:.3f}",
            f"{row.pinned_peak_bytes / row.requested_peak_bytes:.3f} x",
            f"{row.cache_pinned_bytes / 2**30:.3f}",
            f"{row.cache_pinned_bytes / row.requested_peak_bytes:.3f} x",
        )
        for row in rows
    ]
    remark = (
        "Computed: peaks of host memory asked for, pinned by PinnedPool, and pinned by a model of PyTorch's "
        "CachingHostAllocator (rounds up to powers of two, releases nothing). The steps hold all that "
        "autograd saves; the first row is the last of table 3, which holds only the 13 maps."
    )
    return render_table("4. Pinned memory", header, cells, [remark])


def pool_of(step: StepFigures) -> PoolFigures:
    """The pinned memory of the step of table 3."""
    sequence = repeated([[convolution.output_elements * BATCH * FLOAT32_BYTES for convolution in CONVOLUTIONS]])
    return PoolFigures(
        sequence=f"VGG-16, batch {BATCH}, maps of table 3",
        requested_peak_bytes=step.requested_peak_bytes,
        pinned_peak_bytes=step.pinned_peak_bytes,
        cache_pinned_bytes=pinned_by_cache_bytes(sequence),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.core.transfers", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: about two seconds")
    options = parser.parse_args(arguments)
    figures = measure(quick=options.quick)
    print(render(figures))
    if options.json is not None:
        content = {"format": 1, "device": "simulated", "figures": asdict(figures)}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
