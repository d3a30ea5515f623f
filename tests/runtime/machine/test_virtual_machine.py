"""The virtual machine counts bytes exactly and takes the roofline's time, the same with and without data."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from benchmarks.models import vgg116, vgg416
from tests.drawn import quick_and_full
from tests.runtime.rigs.virtual_training import MODELS, train
from vdnn.bytesize import parse_bytes
from vdnn.hardware import load_profile
from vdnn.runtime.machine.allocation_tracker import AllocationTracker
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.step.timeline import Timeline

MIB = 1 << 20


def test_every_storage_counts_once_from_birth_to_end() -> None:
    with VirtualMachine("titan-x") as machine:
        x = torch.empty(MIB, dtype=torch.uint8)
        assert machine.allocated_bytes == MIB
        views = [x[1:], x.view(1024, 1024).t(), x.detach()]
        assert machine.allocated_bytes == MIB
        y = x.clone()
        assert machine.allocated_bytes == 2 * MIB
        del x
        assert machine.allocated_bytes == 2 * MIB, "its views hold it"
        views.clear()
        assert machine.allocated_bytes == MIB
        y.resize_(2 * MIB)
        assert machine.allocated_bytes == 2 * MIB
        del y
        assert machine.allocated_bytes == 0
    assert machine.peak_bytes == 2 * MIB


def test_a_peak_between_two_looks_is_not_lost() -> None:
    with VirtualMachine("titan-x") as machine:
        x = torch.empty(MIB, dtype=torch.uint8)
        (x.clone(), x.clone())
        assert machine.allocated_bytes == MIB
        assert machine.peak_bytes == 3 * MIB
        machine.reset_peak()
        assert machine.peak_bytes == MIB


def test_the_peak_since_the_last_look_has_what_was_freed_before_the_next() -> None:
    tracker = AllocationTracker()
    with tracker:
        held = [torch.empty(MIB, dtype=torch.uint8) for _ in range(3)]
        del held[1:]
        assert tracker.take_peak_bytes() == 3 * MIB
        held.append(torch.empty(MIB, dtype=torch.uint8))
        del held[0]
        assert tracker.take_peak_bytes() == 2 * MIB
        assert tracker.take_peak_bytes() == MIB


def test_what_was_there_before_can_be_counted_too() -> None:
    model = nn.Linear(8, 8)
    tracker = AllocationTracker()
    with tracker:
        tracker.track([model, torch.zeros(4)])
        held = [torch.zeros(2)]
        assert tracker.live_bytes == 4 * (8 * 8 + 8) + 4 * 2
        del held
    assert tracker.peak_bytes == 4 * (8 * 8 + 8) + 4 * 4, "the tensor of four was freed before that of two was made"


def test_time_is_arithmetic_or_traffic_whichever_is_longer() -> None:
    profile = load_profile("p100")
    with VirtualMachine(profile) as machine:
        a, b = torch.empty(4096, 4096), torch.empty(4096, 4096)
        begin = machine.now_ns
        a @ b
        product_ns = machine.now_ns - begin
        begin = machine.now_ns
        a + b
        sum_ns = machine.now_ns - begin
        begin = machine.now_ns
        a.t()
        a.view(-1)
        torch.empty(8)
        assert machine.now_ns == begin, "views and bare allocations run nothing"
    flop_ns = 2 * 4096**3 / (profile.flop_per_s["float32"] * profile.compute_efficiency) * 1e9
    bytes_ns = 3 * 4096**2 * 4 / (profile.memory_bytes_per_s * profile.bandwidth_efficiency) * 1e9
    assert product_ns == round(flop_ns) + profile.kernel_launch_ns
    assert sum_ns == round(bytes_ns) + profile.kernel_launch_ns


def test_fused_attention_takes_the_time_of_its_products() -> None:
    """The forward pass takes 2 products, the scores and the mixing. The backward pass takes 5: the scores again, and
    two gradients of each."""
    batch, heads, tokens, width = 2, 8, 2048, 64
    with VirtualMachine("h100") as machine:
        profile = machine.profile
        query, key, value = (
            torch.empty(batch, heads, tokens, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        begin = machine.now_ns
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        forward_ns = machine.now_ns - begin
        begin = machine.now_ns
        torch.autograd.grad(mixed, (query, key, value), torch.empty_like(mixed))
        backward_ns = machine.now_ns - begin
    product_flop = 2 * batch * heads * tokens * tokens * width
    reached = profile.compute_efficiency_of(["attention"], "bfloat16")
    product_ns = product_flop / (profile.flop_per_s["bfloat16"] * reached) * 1e9
    assert forward_ns == round(2 * product_ns) + profile.kernel_launch_ns
    assert backward_ns == round(5 * product_ns) + profile.kernel_launch_ns


def test_convolutions_use_tf32_where_the_hardware_and_torch_do() -> None:
    def convolution_ns(hardware: str) -> int:
        with VirtualMachine(hardware) as machine:
            convolution, x = nn.Conv2d(256, 256, 3, padding=1), torch.empty(32, 256, 56, 56)
            begin = machine.now_ns
            with torch.no_grad():
                convolution(x)
            return machine.now_ns - begin

    with torch.backends.cudnn.flags(allow_tf32=True):
        fast = convolution_ns("a100-80"), convolution_ns("titan-x")
    with torch.backends.cudnn.flags(allow_tf32=False):
        slow = convolution_ns("a100-80"), convolution_ns("titan-x")
    assert slow[0] > 4 * fast[0]
    assert slow[1] == fast[1]


@pytest.mark.parametrize("convolves", [False, True], ids=["products", "convolutions"])
def test_a_precision_that_a_program_sets_decides_about_tf32(*, convolves: bool) -> None:
    """torch's older switches raise after this."""
    cudnn: Any = torch.backends.cudnn
    backend = cudnn.conv if convolves else torch.backends.cuda.matmul

    def layer_ns(precision: str) -> int:
        before, backend.fp32_precision = backend.fp32_precision, precision
        try:
            with VirtualMachine("a100-80") as machine, torch.no_grad():
                layer = nn.Conv2d(256, 256, 3, padding=1) if convolves else nn.Linear(4096, 4096)
                x = torch.empty(32, 256, 56, 56) if convolves else torch.empty(4096, 4096)
                begin_ns = machine.now_ns
                layer(x)
                return machine.now_ns - begin_ns
        finally:
            backend.fp32_precision = before

    assert layer_ns("ieee") > 4 * layer_ns("tf32")


# Without the recurrent model: oneDNN's kernel makes a workspace for it, and torch's fake kernel makes none.
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"recurrent"}))
@pytest.mark.parametrize("policy", ["keep", "vdnn-all"])
def test_time_and_bytes_are_the_same_with_and_without_data(name: str, policy: str) -> None:
    def timeline(*, fake: bool) -> Timeline:
        with VirtualMachine("titan-x", fake=fake) as machine:
            session, _ = train(machine, name, policy, offload_window="2KiB", reload_window="8KiB")
            assert session.timeline is not None
            found = session.timeline
            session.close()
        return found

    assert timeline(fake=True) == timeline(fake=False)


@pytest.mark.slow
@quick_and_full("added, times_larger", (100, 1), (400, 5))
def test_the_deep_networks_of_the_vdnn_paper_train_under_twelve_gibibytes(added: int, times_larger: int) -> None:
    """VGG-416 at batch 32 would take 63 GiB, and VGG-116 16 GiB; the paper's card has 12 GiB."""
    with VirtualMachine("titan-x") as machine:
        workload = (vgg116 if added == 100 else vgg416)(32)
        optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.01)
        with vdnn.offload(budget="12GiB", device=machine) as session:
            for _ in range(3):
                optimizer.zero_grad()
                workload.loss(workload.model(*workload.inputs)).backward()
                optimizer.step()
    assert session.recording is not None
    assert session.timeline is not None
    assert session.recording.peak_bytes > times_larger * parse_bytes("12GiB")
    assert session.timeline.peak_bytes <= parse_bytes("12GiB")
    assert machine.fits


def test_a_machine_leaves_nothing_behind() -> None:
    with VirtualMachine("titan-x") as machine:
        session, gradients = train(machine, "resnet")
        del gradients
        gc.collect()
        transports = [one for one in session._engine.transports.values() if one is not None]
        assert [one.pool.stats.live_bytes for one in transports] == [0]
    assert isinstance(torch.zeros(1), torch.Tensor)
    assert type(torch.zeros(1)) is torch.Tensor


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    """A data set whose items a worker makes by torch operations."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index)).square()


def test_a_machine_that_is_left_is_freed_without_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        machine = VirtualMachine("titan-x", fake=False)
        with machine:
            torch.ones(8).sin()
        reference = weakref.ref(machine)
        del machine
        assert reference() is None
    finally:
        gc.enable()


def test_writes_to_a_list_of_tensors_are_counted_as_on_a_gpu() -> None:
    """torch.optim's foreach forms, averages and momentum encoders write so."""

    def versions() -> list[int]:
        tensors, others = [torch.ones(3) for _ in range(2)], [torch.zeros(3) for _ in range(2)]
        with torch.inference_mode():
            torch._foreach_add_([torch.ones(3)], 1.0)
        torch._foreach_lerp_(tensors, others, 0.5)
        torch._foreach_mul_(tensors[:1], 2.0)
        torch._foreach_mul(tensors, 2.0)
        return [one._version for one in tensors]

    with VirtualMachine("titan-x", fake=False):
        found = versions()
    assert found == versions() == [2, 1]


def test_workers_of_a_loader_are_not_on_the_machine() -> None:
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    with VirtualMachine("h100", fake=False) as machine:
        found = [batch.sum().item() for batch in loader]
        assert machine.allocated_bytes < 1024
    assert found == [8 * (0 + 1), 8 * (4 + 9)]
