"""Reports by users of other offloaders of memory that grew, stayed or moved too late, one test each.

Each test is named after what happened, and cites its report. Wrong gradients and crashes are in test_user_reports.
Whether pinned pages are on the GPU's own NUMA node is not tested: that needs a host with several nodes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import vdnn
from tests.runtime.conftest import OpenSession
from tests.runtime.rigs.lives import one_backward as train
from tests.runtime.rigs.networks import conv_chain, images, perceptron
from tests.runtime.rigs.side_by_side import alive, assert_same_as_plain
from vdnn import _C
from vdnn.errors import BudgetError
from vdnn.hardware.link_probe import measure_link
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.counters import Kept
from vdnn.runtime.storage.transport import Transport
from vdnn.step.timeline import Timeline, Track
from vdnn.user_warnings import VdnnWarning

KIB = 1 << 10


def transport_of(session: Session) -> Transport:
    (transport,) = session._engine.transports.values()
    assert transport is not None
    return transport


class Experts(nn.Module):
    """Routes every row to one expert. The graphs of the other experts are built and never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(perceptron(depth=1) for _ in range(4))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        outputs = [expert(x) for expert in self.experts]
        return outputs[chosen]  # type: ignore[no-any-return]


def test_saves_that_are_never_used_do_not_pile_up_over_steps(session: Session) -> None:
    """axolotl#3638, 24 to 260 GiB: saves that were never unpacked stayed in a tracker that was never emptied."""
    model = Experts()
    pinned = 0
    with session:
        for step in range(40):
            model(torch.randn(8, 16), step % 4).square().sum().backward()
            if step == 5:
                pinned = transport_of(session).pool.stats.pinned_bytes
    assert alive(session) == {}
    assert transport_of(session).pool.stats.pinned_bytes == pinned


def test_nothing_is_stashed_after_the_session_is_left(session: Session) -> None:
    """trl#5700, 5 to 7 GB: stashed tensors outlived the context."""
    model, x = conv_chain(), images()
    with session:
        train(model, x)
    assert alive(session) == {}


def test_no_step_after_the_first_ones_waits_for_pinned_memory(session: Session) -> None:
    """torchtune#2076 and pytorch#186162: pinned memory was allocated inside every step, 465 ms of it."""
    model, x = conv_chain(), images()
    with session:
        for _ in range(2):
            train(model, x)
        awaited = transport_of(session).pool.stats.growths_awaited
        for _ in range(5):
            train(model, x)
    assert transport_of(session).pool.stats.growths_awaited == awaited


def test_host_memory_is_what_was_asked_for_and_not_the_next_power_of_two(open_session: OpenSession) -> None:
    """pytorch#95823, vllm#56410, sglang#36562: blocks rounded to powers of two took up to twice the memory."""
    session = open_session(offload_window="64KiB")
    x = torch.randn((1 << 18) + 64, requires_grad=True)  # 256 bytes more than 1 MiB
    with session:
        # sin saves a leaf, which is kept; exp and tanh save their results; sum saves nothing. The loss is
        # a product of two numbers, and saves both.
        loss = x.sin().exp().tanh().sum() * torch.ones((), requires_grad=True).exp()
    stats = transport_of(session).pool.stats
    offloaded = session.counters.storage_bytes
    loss.backward()
    assert offloaded == 2 * x.nbytes + 4 + 4
    assert stats.live_bytes == offloaded
    assert stats.pinned_bytes <= 1.06 * offloaded + (1 << 20)  # the pool's slack, and a slab


def test_sources_in_flight_never_exceed_their_window(
    open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """axolotl#3733: offloading all took more memory than it freed, since copies queued up without a bound."""
    window = 8 * KIB
    session = open_session(offload_window=window)
    pack, flights = session._engine.packer.pack_hook, []

    def watched(tensor: torch.Tensor) -> Any:
        packed = pack(tensor)
        for transport in session._engine.transports.values():
            assert transport is not None
            flights.append(transport.queue.stats.offload_in_flight_bytes)
        return packed

    monkeypatch.setattr(session._engine.packer, "pack_hook", watched)
    model, x = perceptron(width=32, depth=12), torch.randn(16, 32)  # storages of 2 KiB
    assert_same_as_plain(session, lambda: train(model, x), model)
    assert window // 2 < max(flights) <= window


def test_a_small_view_that_is_the_last_holder_of_a_large_storage_is_offloaded(open_session: OpenSession) -> None:
    """DeepSpeed#8387, out of memory at step 0: views were skipped, although they alone held their storage."""
    session = open_session(min_bytes="16KiB", offload_window=1)
    x = torch.randn(4, 64, 64, requires_grad=True)
    with session:
        large = x.exp()  # 64 KiB; exp saves its result
        held = StorageWeakRef(large.untyped_storage())
        small = large[1, :8] * 1.0
        del large
        loss = small.sum()
        row = x.detach().clone()[2, :4]  # 1 KiB of a storage of 64 KiB that nothing else holds
        row_held = StorageWeakRef(row.untyped_storage())
        loss = loss + (row * x[0, :4]).sum()
        del row
        for _ in range(3):  # one hook issues the copy, another needs the window and releases the source
            loss = loss + (torch.ones(64, 64) * x[0]).sum()
    assert held.expired()
    assert row_held.expired()
    loss.backward()


def test_reloads_are_issued_ahead_of_their_use(open_session: OpenSession) -> None:
    """torchtitan#2379 and pytorch#174960: reloads on demand leave no computation to overlap with."""
    session = open_session(offload_window=1, reload_window="4KiB")
    model, x = perceptron(depth=12), torch.randn(16, 16)  # storages of 1 KiB
    assert_same_as_plain(session, lambda: train(model, x), model)
    assert session.counters.demand_reloads <= 2, session.report()
    assert session.counters.prefetched_reloads >= 10


def test_a_pass_without_gradients_first_does_not_use_up_anything(session: Session) -> None:
    """NeMo-RL#2279: a rollout without gradients was taken for the warm-up step."""
    model, x = conv_chain(), images()
    with session, torch.no_grad():
        model(x)
    assert_same_as_plain(session, lambda: train(model, x), model)


def test_nothing_offloaded_is_warned_of_once(open_session: OpenSession, recwarn: pytest.WarningsRecorder) -> None:
    """verl#3629: a reentrant checkpoint made offloading silently ineffective."""
    session = open_session(min_bytes="1GiB")
    for _ in range(2):
        with session:
            train(perceptron(), torch.randn(2, 16))
    (warned,) = recwarn
    said = str(warned.message)
    assert warned.category is VdnnWarning
    assert warned.filename == __file__
    assert said.startswith(f"vdnn: none of {session.counters.saves // 2} saves was offloaded (")
    assert Kept.SMALL.value in said


def test_pinned_memory_stops_at_the_hosts_cap(open_session: OpenSession) -> None:
    """DeepSpeed#1891, LlamaFactory#8671: the host ran out of memory, and the machine failed."""
    session = open_session(host_budget="16KiB")
    model, x = conv_chain(), images(8)
    assert_same_as_plain(session, lambda: train(model, x), model)
    assert transport_of(session).pool.stats.pinned_peak_bytes <= 16 * KIB
    assert session.counters.kept[Kept.HOST_FULL] > 0


def test_weights_are_never_offloaded(session: Session) -> None:
    """llama-cookbook#115: a wrapper offloaded the weights too. Linear saves a transposed view of its own."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)), torch.randn(4, 16)
    with session:
        train(model, x)
    # The input, the first Linear's output as the norm reads it, its mean and deviation, the norm's output, the model's
    # output.
    assert session.counters.storages == 6
    assert session.counters.kept[Kept.PARAMETER] == 3


def test_memory_is_really_released_while_forward_runs(open_session: OpenSession) -> None:
    """TransformerEngine#1582: storages were copied, but stayed on the device."""
    session = open_session(offload_window=1)
    weight = torch.ones(64, 64, requires_grad=True)
    with session:
        x = torch.randn(64, 64)
        held = StorageWeakRef(x.untyped_storage())
        products = [x * weight]
        del x
        products += [torch.randn(64, 64) * weight for _ in range(2)]
        assert held.expired()
    assert session.counters.freed_bytes >= weight.nbytes
    torch.stack(products).sum().backward()


def test_many_small_offloads_are_submitted_together(open_session: OpenSession) -> None:
    """torchtitan#467: thousands of small copies froze the program."""
    session = open_session(offload_window="1MiB")
    model, x = perceptron(depth=64), torch.randn(4, 16)
    with session:
        loss = model(x).sum()
        stats = transport_of(session).queue.stats
    loss.backward()
    assert stats.offloads >= 64
    assert stats.submissions <= 2


@pytest.mark.parametrize("rate", [4_000_000_000, 24_000_000_000])
def test_a_link_through_the_wrong_numa_node_shows_in_the_probe(rate: int) -> None:
    """pytorch#160420, DeepSpeed#1576, torchtitan#3519: 4 to 12 GB/s where 24 were possible, without any message. The
    doctor shows this figure, and reports if it does not know the node nearest to a GPU."""
    device = _C.SimDevice(link=_C.LinkModel(to_host_bytes_per_s=rate, to_device_bytes_per_s=rate, latency_ns=0))
    figures = measure_link(device, block_bytes=1 << 20, repeats=3)
    device.close()
    assert figures.to_host_bytes_per_s == pytest.approx(rate, rel=1e-4)
    assert figures.to_device_bytes_per_s == pytest.approx(rate, rel=1e-4)


class Block(nn.Module):
    """The feed-forward part of a transformer block, four times as wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 1024)
        self.down = nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return out


def checkpointed_step(policy: str, **options: Any) -> tuple[int, int, Session]:
    """Returns the bytes allocated after the forward of a step, the peak of that step, and the session."""
    with VirtualMachine("titan-x") as machine:
        blocks, x = nn.ModuleList(Block() for _ in range(4)), torch.randn(256, 256, requires_grad=True)
        with vdnn.offload(
            policy, device=machine, min_bytes=0, limits=vdnn.Limits(offload_window=1), **options
        ) as session:
            for _ in range(3):
                machine.reset_peak()
                hidden = x * 1.0
                for block in blocks:
                    hidden = checkpoint(block, hidden, use_reentrant=False)
                loss = hidden.square().sum()
                after_forward = machine.allocated_bytes
                loss.backward()
                del hidden, loss
                x.grad = None
                blocks.zero_grad(set_to_none=True)
        return after_forward, machine.peak_bytes, session


def test_a_peak_that_offloading_cannot_lower_is_said_before_anybody_pays() -> None:
    """accelerate#4175: 1.54 GB less were allocated after the forward, but the peak was in the recompute and stayed the
    same, and the step took a third longer."""
    kept_after_forward, peak, _ = checkpointed_step("keep")
    after_forward, peak_offloaded, _ = checkpointed_step("vdnn-all")
    # The inputs of the four blocks and the last output are offloaded. The copies of the last of them are still in
    # flight.
    assert kept_after_forward - after_forward >= 3 * 256 * 256 * 4
    assert peak_offloaded == peak
    with pytest.raises(BudgetError, match="after the last use .*, even with everything offloaded") as refused:
        checkpointed_step("auto", budget=peak - 1)
    assert refused.value.least_bytes == peak
    _, _, session = checkpointed_step("auto", budget=peak)
    assert session.plan is not None
    assert session.plan.offloaded_bytes == 0, "what would gain nothing stays"


def measured_step(policy: str, **options: Any) -> Timeline:
    """A step of a chain that computes too little to hide its copies: maps of 196 MiB and small convolutions."""
    with VirtualMachine("titan-x") as machine:
        model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Conv2d(256, 256, 1), nn.ReLU())])
        x = torch.randn(64, 256, 56, 56)
        with vdnn.offload(policy, device=machine, measure=True, **options) as session:
            for _ in range(4):
                model(x).sum().backward()
                model.zero_grad(set_to_none=True)
                session.step()
        timeline = session.timeline
        assert timeline is not None
        return timeline


def test_a_budget_offloads_the_least_that_fits_and_keeps_to_it() -> None:
    """DeepSpeed#8255: offloading everything took 40 % more time, and the predicted memory was too low or too high."""
    keep, blind = measured_step("keep"), measured_step("vdnn-all")
    assert keep.stall_ns == 0
    assert blind.step_ns > 1.4 * keep.step_ns
    last = blind
    for tenths in (3, 6, 9):
        budget = blind.peak_bytes + tenths * (keep.peak_bytes - blind.peak_bytes) // 10
        planned = measured_step("auto-offload", budget=budget)
        assert planned.peak_bytes <= budget
        assert planned.copied_bytes(Track.TO_HOST) < last.copied_bytes(Track.TO_HOST)
        assert keep.step_ns <= planned.step_ns <= last.step_ns
        last = planned
    assert last.step_ns < 1.05 * keep.step_ns
    roomy = measured_step("auto-offload", budget=keep.peak_bytes)
    assert roomy.copied_bytes(Track.TO_HOST) == 0
    assert roomy.step_ns == keep.step_ns
