"""Wrong gradients and crashes that users of other offloaders reported, one test each, named after what happened.

Each test cites its report. Reports of memory, host memory and overlap are in test_user_reports_of_memory; a test checks
that every report is cited. One report is wrong only under tensor parallelism (torchtune#2683): its test shows the cause
alone, a compute stream that changes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import vdnn
from tests.runtime.conftest import EITHER_WAY, OpenSession
from tests.runtime.rigs.lives import one_backward as train
from tests.runtime.rigs.networks import conv_chain, images, perceptron
from tests.runtime.rigs.side_by_side import assert_nothing_alive, assert_same_as_plain
from vdnn import _C
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.transport import Transport

pytestmark = EITHER_WAY

# The most instructive reports, in the order of the survey; of each group, the first.
REPORTS = (
    *("torchtune#1867", "torchtune#2683", "Megatron#7398", "trl#7195", "torchtitan#2581", "ms-swift#10157", "trl#6241"),
    *("axolotl#3638", "trl#5700", "trl#4280", "trl#5694", "torchtune#2076", "pytorch#186162", "pytorch#95823"),
    *("pytorch#160420", "axolotl#3733", "accelerate#4175", "DeepSpeed#8255", "DeepSpeed#8387", "pytorch#106360"),
    *("torchtitan#2379", "pytorch#191236", "pytorch#148222", "NeMo-RL#2279", "DeepSpeed#1891"),
)


def test_every_report_has_a_test_that_cites_it() -> None:
    here = Path(__file__)
    files = [path.read_text() for path in here.parent.glob(f"{here.stem}*.py")]
    docstrings = [test.split('"""')[1] for file in files for test in file.split("\ndef test_")[1:] if '"""' in test]
    uncited = [report for report in REPORTS if not any(report in docstring for docstring in docstrings)]
    assert uncited == []
    assert len(set(REPORTS)) == 25


class KeepsWhatItRead(torch.autograd.Function):
    """Its backward hands a view of a saved tensor out of the node."""

    escaped: list[torch.Tensor]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        KeepsWhatItRead.escaped.append(x[1:3].t())
        return gradient * 2


def test_a_view_of_a_reload_is_used_after_its_node_has_run(session: Session) -> None:
    """torchtune#1867, NaN gradients: the reload was released while a view of it was in use."""
    KeepsWhatItRead.escaped = []
    model, x = perceptron(), torch.randn(4, 16, requires_grad=True)
    with session:
        hidden = model(x).sin()
        expected = hidden.detach()[1:3].t().clone()
        train(model, KeepsWhatItRead.apply(hidden))
        for _ in range(3):
            train(model, x)
    assert torch.equal(KeepsWhatItRead.escaped[0], expected)
    KeepsWhatItRead.escaped.clear()


def test_the_compute_stream_changes_between_hooks(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtune#2683, worse loss with tensor parallelism: the compute stream was read once, at the start."""
    handles = [1, 2, 3]

    def current_stream(transport: Transport) -> _C.Stream:
        # The program switches to another stream, and orders it behind the previous one, as a program must.
        device = transport.device
        last = device.record(device.adopt_stream(handles[0]))
        handles.append(handles.pop(0))
        device.wait(device.adopt_stream(handles[0]), last)
        return device.adopt_stream(handles[0])

    monkeypatch.setattr(Transport, "current_stream", current_stream)
    model, x = conv_chain(), images()
    assert_same_as_plain(session, lambda: train(model, x), model)


def test_a_reload_on_demand_waits_for_its_own_offload(open_session: OpenSession) -> None:
    """Megatron#7398: a reload on demand did not wait for its own copy to the host."""
    session = open_session(offload_window=1, reload_window=1)
    model, x = conv_chain(), images()
    assert_same_as_plain(session, lambda: train(model, x), model)
    assert session.counters.demand_reloads > 0


def test_an_offset_view_comes_back_whole(session: Session) -> None:
    """trl#7195: an offset view was cloned on the copy stream after the stream that it had to wait for."""
    x = torch.randn(12, 40, requires_grad=True)

    def step() -> torch.Tensor:
        hidden = x.exp()
        loss = (hidden[3:7, 5:25].sin() * hidden[4:8, 6:26].cos()).sum()
        loss.backward()
        return loss

    assert_same_as_plain(session, step, x)


def test_host_blocks_reused_over_many_steps_keep_each_steps_bytes(open_session: OpenSession) -> None:
    """torchtitan#2581: a pinned slab was overwritten before its last reader had finished."""
    session = open_session("vdnn-all", host_budget="16KiB")
    model = conv_chain()
    for _ in range(12):
        x = images()
        assert_same_as_plain(session, lambda x=x: train(model, x), model)  # type: ignore[misc]
    assert session.counters.storages > 12 * 4, "the blocks of 16 KiB served more than once"


def test_a_tensor_and_its_transpose_are_two_views_of_one_copy(session: Session) -> None:
    """ms-swift#10157: a matrix and its transpose have the same address and dtype, and so shared one layout."""
    x = torch.randn(12, 12, requires_grad=True)

    def step() -> torch.Tensor:
        hidden = x.tanh()
        loss = (hidden @ hidden.t() @ hidden).sum()
        loss.backward()
        return loss

    assert_same_as_plain(session, step, x)
    # tanh's result, saved by tanh and as both operands of the first product; and that product, saved by the second.
    assert session.counters.storages + session.counters.discarded == 2


def test_a_new_tensor_at_a_reused_address_is_offloaded(open_session: OpenSession) -> None:
    """trl#6241 and #7193: a tensor at the address of a freed one was taken for the freed one."""
    session = open_session(offload_window=1)
    # Blocks of our own, since whether malloc reuses an address depends on all that the process did before. A storage
    # holds its block until it is released.
    blocks = [bytearray(32 * 32 * 4) for _ in range(4)]
    unheld = sys.getrefcount(blocks[0])
    taken: list[int] = []

    def filled(value: float) -> torch.Tensor:
        taken.append(next(index for index in range(4) if sys.getrefcount(blocks[index]) == unheld))
        return torch.frombuffer(blocks[taken[-1]], dtype=torch.float32).view(32, 32).fill_(value)

    weight = torch.ones(32, 32, requires_grad=True)
    with session:
        for step in range(20):
            before = session.counters.storages
            loss = (filled(step) * weight).sum()
            filled(7).mul(weight).sum()  # in the block of the first if that is released already
            loss.backward()
            session.step()
            assert session.counters.storages == before + 1
            assert weight.grad is not None
            assert torch.equal(weight.grad, torch.full((32, 32), float(step)))
            weight.grad = None
    assert max(taken) < 3, "no block was reused before all were: this proves little"


def test_a_forward_starts_although_the_last_graph_was_partly_unused(session: Session) -> None:
    """trl#4280 and torchtune#2709, "Backward pass should have cleared tracker of all tensors"."""
    model, x = perceptron(), torch.randn(4, 16)
    with session:
        model(x)
        first, second = model(x), model(x)
        first.sum().backward()
        third = model(x)
        (second.sum() + third.sum()).backward()
        del first, second, third
    model.zero_grad()
    assert_same_as_plain(session, lambda: train(model, x), model)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1::3],
        lambda t: t[5:, :7].t(),
        lambda t: t.flatten()[3:99],
        lambda t: t.as_strided((6, 6), (13, 2), 17),
        lambda t: t.unfold(1, 4, 2),
        lambda t: t.chunk(3)[1],
        lambda t: t[None].expand(3, -1, -1)[1:, 2:],
    ],
)
def test_strided_and_offset_views_do_not_reach_outside_their_copy(session: Session, view: Any) -> None:
    """trl#5694: the copy was compact, but the view was made with its old offset and strides."""
    x = torch.randn(12, 24, requires_grad=True)

    def step() -> torch.Tensor:
        part = view(x.exp())
        loss = (part.sin() * part).sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    assert_same_as_plain(session, step, x)


def test_checkpointed_blocks_run_inside_a_session(session: Session) -> None:
    """transformers#43597: save_on_cpu was asked for around checkpointed blocks."""
    blocks, x = nn.ModuleList(perceptron(depth=2) for _ in range(3)), torch.randn(4, 16, requires_grad=True)

    def step() -> torch.Tensor:
        hidden = x * 1.5
        for block in blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        loss = hidden.square().sum()
        loss.backward()
        return loss

    assert_same_as_plain(session, step, blocks, x)


def halves_step_ns(machine: VirtualMachine) -> int:
    """The time of a step of four convolutions, in two checkpointed halves. Each half saves its input, of 196 MiB."""
    halves = [nn.Sequential(*[nn.Conv2d(256, 256, 3, padding=1) for _ in range(2)]) for _ in range(2)]
    hidden = torch.randn(64, 256, 56, 56, requires_grad=True) * 1.0
    begin_ns = machine.now_ns
    for half in halves:
        hidden = checkpoint(half, hidden, use_reentrant=False)
    hidden.sum().backward()
    return machine.now_ns - begin_ns


def test_save_on_cpu_hides_its_copies_behind_the_computing() -> None:
    """pytorch#106360, requested in 2023, and transformers#43597: torch's own save_on_cpu stops the computation for
    every copy."""
    with VirtualMachine("titan-x") as machine:
        plain_ns = halves_step_ns(machine)
    with VirtualMachine("titan-x") as machine, vdnn.save_on_cpu(pin_memory=True, device=machine) as session:
        overlapped_ns = halves_step_ns(machine)
    assert session.counters.storage_bytes == 2 * 64 * 256 * 56 * 56 * 4
    assert session.counters.reloaded_bytes == 64 * 256 * 56 * 56 * 4, "the last one saved was still there"
    assert overlapped_ns == plain_ns
    assert machine.stall_ns == 0
    machine.device.close()


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")  # from torch 2.15 on
def test_tensors_that_selective_checkpointing_saves_are_right(session: Session) -> None:
    """pytorch#191236: these tensors bypass the hooks today, and will pass through them in later releases."""
    block, x = perceptron(depth=3), torch.randn(4, 16, requires_grad=True)

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operation is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def step() -> torch.Tensor:
        hidden = checkpoint(
            block, x * 1.5, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
        loss = hidden.square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    assert_same_as_plain(session, step, block, x)


def test_a_compiled_model_gives_the_same_gradients(session: Session) -> None:
    """pytorch#148222, #113263: under torch.compile a region unpacks all its saves at once; this was once silently
    wrong."""
    model, x = perceptron(depth=2), torch.randn(4, 16)
    model.compile(backend="aot_eager")
    assert_same_as_plain(session, lambda: train(model, x), model)
    assert_nothing_alive(session)
