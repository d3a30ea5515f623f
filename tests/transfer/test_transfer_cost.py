"""The cost of transfers: figures to read, printed by `make figures`, beside a memcpy of the same bytes in the same run.

No times are asserted: on a busy machine, a copy on another thread waits for a core. The targets are at least 0.9 of
memcpy for a warm block of 64 MiB, and at most 5 us of bookkeeping for each transfer. The copied bytes are asserted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.core.bookkeeping import CHUNK, LARGE_BYTES, SMALL_BYTES, QueueWithoutBytes
from benchmarks.core.data_path import Train, measure_data_path

BLOCK_BYTES = 64 * 2**20


@pytest.fixture
def train() -> Iterator[Train]:
    made = Train(BLOCK_BYTES, blocks=1)
    yield made
    made.close()


@pytest.mark.benchmark(group="64 MiB")
def test_plain_memcpy(train: Train, benchmark: BenchmarkFixture) -> None:
    benchmark(train.memcpy)


@pytest.mark.benchmark(group="64 MiB")
def test_offload_of_a_warm_block(train: Train, benchmark: BenchmarkFixture) -> None:
    train.release(train.offload())  # after this the pool's block is warm
    benchmark(lambda: train.release(train.offload()))
    copies = train.offload()
    block = copies[0].block
    assert ctypes.string_at(block.address, block.bytes) == ctypes.string_at(train.source, BLOCK_BYTES)
    train.release(copies)


@pytest.mark.benchmark(group="64 MiB")
def test_reload_of_a_block(train: Train, benchmark: BenchmarkFixture) -> None:
    copies = train.offload()
    benchmark(train.reload, copies)
    assert ctypes.string_at(train.target, BLOCK_BYTES) == ctypes.string_at(train.source, BLOCK_BYTES)
    train.release(copies)


def test_offload_beside_memcpy(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str]) -> None:
    """Alternates the two, so that both are measured under the same conditions."""
    repeats = 1 if benchmark.disabled else 25
    figures = benchmark.pedantic(measure_data_path, args=(BLOCK_BYTES, repeats), rounds=1)
    assert figures.offload_bytes_per_s > 0
    benchmark.extra_info["offload_ratio"] = figures.offload_ratio
    benchmark.extra_info["reload_ratio"] = figures.reload_ratio
    with capsys.disabled():
        print(
            f"\n  64 MiB, warm: memcpy {figures.memcpy_bytes_per_s / 1e9:.2f} GB/s, "
            f"offload {figures.offload_ratio:.2f} x of it, reload {figures.reload_ratio:.2f} x"
        )


@pytest.mark.benchmark(group=f"{CHUNK} transfers out and back")
@pytest.mark.parametrize("in_flight", [0, 512])
@pytest.mark.parametrize("block_bytes", [LARGE_BYTES, SMALL_BYTES], ids=["alone", "batched"])
def test_bookkeeping(
    block_bytes: int, in_flight: int, benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    desk = QueueWithoutBytes(block_bytes, in_flight)
    benchmark(desk.chunk_ns)
    if not benchmark.disabled:
        each_us = benchmark.stats.stats.median / (2 * CHUNK) * 1e6
        benchmark.extra_info["us_per_transfer"] = each_us
        with capsys.disabled():
            print(f"\n  bookkeeping of a transfer, {in_flight} in flight: {each_us:.2f} us")
    desk.close()
