"""The accelerator behaves as a device: it runs work late and in order, and hands released memory out again at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deferred import DeferredAccelerator, Mode
from tests.drawn import quick_and_full


def test_operations_run_only_when_somebody_waits() -> None:
    with DeferredAccelerator(Mode.COMPUTE_LATE) as accelerator:
        x = torch.ones(1000, device="deferred")
        for _ in range(50):
            x = x + 1
        assert accelerator.deferred_operations >= 51
        assert x.sum().item() == 51 * 1000
        assert not accelerator.violations


def test_a_stream_is_in_order(mode: Mode) -> None:
    with DeferredAccelerator(mode, seed=4) as accelerator:
        x = torch.zeros(10, device="deferred")
        for step in range(20):
            x.mul_(2).add_(step)
        expected = torch.zeros(10)
        for step in range(20):
            expected.mul_(2).add_(step)
        assert torch.equal(x.cpu(), expected)
        assert not accelerator.violations


def test_views_share_memory_and_run_nothing() -> None:
    with DeferredAccelerator() as accelerator:
        x = torch.arange(24.0).to("deferred")
        before = accelerator.deferred_operations
        view = x.view(4, 6).t()[2:4].unsqueeze(0).expand(3, 2, 4)
        assert accelerator.deferred_operations == before
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        x.fill_(7)
        assert view.cpu().unique().tolist() == [7.0]


def test_memory_is_given_to_the_next_allocation_of_the_stream_at_once() -> None:
    with DeferredAccelerator(Mode.COMPUTE_LATE) as accelerator:
        x = torch.ones(1000, device="deferred")
        address = x.data_ptr()
        y = x + 1  # has not run when x is released
        del x
        z = torch.full((1000,), 5.0, device="deferred")
        assert z.data_ptr() == address
        assert y.cpu().unique().tolist() == [2.0], "the stream's own order kept x until it had been read"
        assert z.cpu().unique().tolist() == [5.0]
        assert accelerator.memory.reused > 0
        assert not accelerator.violations


def test_out_of_memory_is_raised_where_a_gpu_would() -> None:
    with DeferredAccelerator(capacity="1MiB") as accelerator:
        held = [torch.empty(100_000, device="deferred") for _ in range(2)]
        with pytest.raises(torch.OutOfMemoryError, match="out of memory: 400000 bytes asked for, 800000 of"):
            torch.empty(100_000, device="deferred")
        assert accelerator.memory.flushes == 1
        held.pop()
        assert torch.empty(100_000, device="deferred").numel() == 100_000


def test_requested_bytes_are_counted() -> None:
    with DeferredAccelerator() as accelerator:
        x = torch.empty(1000, device="deferred")
        y = torch.empty(3, device="deferred")
        assert accelerator.memory.allocated_bytes == 4012
        del x
        assert (accelerator.memory.allocated_bytes, accelerator.memory.peak_bytes) == (12, 4012)
        accelerator.reset_peak()
        assert accelerator.memory.peak_bytes == 12
        assert y.numel() == 3


def side_stream() -> torch.Stream:
    return torch.Stream(device="deferred")


def test_a_missing_wait_between_streams_is_named() -> None:
    with DeferredAccelerator(Mode.COMPUTE_LATE) as accelerator:
        x = torch.ones(1000, device="deferred")
        with side_stream():
            y = x * 3  # x may not be there yet: nothing orders the read after the write
        accelerator.synchronize()
        (violation, *_) = accelerator.violations
        assert "fill_" in violation.first
        assert violation.first_stream == "compute"
        assert "mul" in violation.second
        assert violation.second_stream.startswith("side")
        assert y.shape == (1000,)


def test_with_the_wait_it_is_silent_and_right(mode: Mode) -> None:
    with DeferredAccelerator(mode, seed=2) as accelerator:
        side = side_stream()
        x = torch.ones(1000, device="deferred")
        produced = torch.accelerator.current_stream().record_event()
        side.wait_event(produced)
        with side:
            y = x * 3
            done = side.record_event()
        torch.accelerator.current_stream().wait_event(done)
        assert (y + 1).cpu().unique().tolist() == [4.0]
        assert not accelerator.violations


def test_memory_freed_while_another_stream_reads_it_is_a_violation_unless_recorded() -> None:
    for recorded in (False, True):
        with DeferredAccelerator(Mode.COMPUTE_LATE) as accelerator:
            side = side_stream()
            x = torch.ones(1000, device="deferred")
            side.wait_event(torch.accelerator.current_stream().record_event())
            with side:
                y = x * 3
            if recorded:
                x.record_stream(side)
            del x  # x's own stream reuses the memory, and overwrites it before the side stream has read it
            accelerator.synchronize()
            assert bool(accelerator.violations) is not recorded
            if recorded:
                assert y.cpu().unique().tolist() == [3.0]


def test_an_operation_that_would_write_to_the_cpus_memory_is_refused_as_on_a_gpu() -> None:
    with DeferredAccelerator():
        on_cpu, there = torch.zeros(3), torch.ones(3, device="deferred")
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            on_cpu.add_(there)
        on_cpu.copy_(there)
    assert on_cpu.tolist() == [1, 1, 1]


def test_what_depends_on_data_waits_and_is_listed() -> None:
    with DeferredAccelerator() as accelerator:
        x = torch.tensor([0.0, 1.0, 0.0, 2.0]).to("deferred")
        assert x.nonzero().flatten().tolist() == [1, 3]
        assert accelerator.synchronous_operations == {"aten::nonzero": 1}


def test_a_failure_on_a_stream_is_told_at_the_next_wait() -> None:
    with DeferredAccelerator() as accelerator:
        index = torch.tensor([7]).to("deferred")
        wrong = torch.ones(3, device="deferred").index_select(0, index)
        with pytest.raises(RuntimeError, match=r"an operation failed on the deferred accelerator: aten::index_select"):
            accelerator.synchronize()
        assert wrong.shape == (1,)
        with pytest.raises(RuntimeError, match="failed on the deferred accelerator"):
            accelerator.synchronize()  # as on a GPU: the error persists
        accelerator._extension.stop()  # stopped without a last wait, which would raise the error once more
        accelerator._extension.start(
            accelerator._table, [stream.index for stream in accelerator._streams], 1 << 20, None
        )


def how_far_copies_lag(mode: Mode, seed: int) -> float:
    """The average number of writes by which copies lag behind their source, if nothing orders the two. Negative: they
    run early."""
    count = 40
    with DeferredAccelerator(mode, seed=seed) as accelerator:
        side = side_stream()
        source, copies = torch.zeros(1, device="deferred"), torch.zeros(count, device="deferred")
        accelerator.synchronize()
        for number in range(count):
            source.fill_(number)
            with side:
                copies[number].copy_(source[0])
        accelerator.synchronize()
        return (copies.cpu() - torch.arange(count)).mean().item()


@pytest.mark.slow
@quick_and_full("seeds", 16, 48)
def test_a_seed_may_hold_one_stream_back_and_hurry_another(seeds: int) -> None:
    lags = [how_far_copies_lag(Mode.RANDOM, seed) for seed in range(seeds)]
    assert max(lags) > 15, "there is no seed under which copies are far behind"
    assert min(lags) < -15, "there is no seed under which computing is far behind"
    assert len([lag for lag in lags if abs(lag) < 8]) > seeds // 6, "no seed has them near each other"
    assert lags[:4] == [how_far_copies_lag(Mode.RANDOM, seed) for seed in range(4)], "a seed repeats its schedule"


def test_an_operation_runs_outside_of_the_callers_modes() -> None:
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.devices: set[str] = set()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.devices |= {found.device.type for found in args if isinstance(found, torch.Tensor)}
            return function(*args, **(kwargs or {}))

    for seed in range(8):
        with DeferredAccelerator(Mode.RANDOM, seed=seed), Seen() as seen, torch.autocast("cpu"):
            x = torch.ones(4, 4, device="deferred")
            for _ in range(8):
                x = torch.addmm(x, x, x)
            assert x.dtype == torch.float32
        assert seen.devices == {"deferred"}


def test_only_one_runs_at_a_time() -> None:
    with DeferredAccelerator(), pytest.raises(RuntimeError, match="running already"), DeferredAccelerator():
        pass


def test_without_one_a_tensor_cannot_be_made() -> None:
    with pytest.raises(RuntimeError, match="no deferred accelerator is running"):
        torch.empty(3, device="deferred")
