"""One rank of 64, without the other 63: FSDP2 over torch's fake process group, on a virtual machine.

Collectives move nothing and take no time, but their allocations are counted. So the memory of a rank is that of the
real job, and its time is that of computing and of copies.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import vdnn
from vdnn.integrations.ranks import order_of
from vdnn.planning.least_memory import least_bytes
from vdnn.runtime.session.session import Session

pytestmark = pytest.mark.slow

GATHERS_WITHOUT_DATA = pytest.mark.skipif(
    torch.__version__.startswith("2.10."), reason="torch 2.10 cannot gather tensors without data"
)
WIDTH, LAYERS, BATCH = 512, 4, 8192


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return out


@pytest.fixture
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def mesh_of(rank: int, ranks: int) -> DeviceMesh:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    return init_device_mesh("cpu", (ranks,))


def train(mesh: DeviceMesh, budget: int | None) -> Session:
    """Four steps: one to warm up, one to record, two under the plan."""
    with vdnn.VirtualMachine("h100") as machine:
        model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with vdnn.offload("prefix-cut", budget=budget, device=machine, measure=True) as session:
            for _ in range(4):
                model(torch.empty(BATCH, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return session


@GATHERS_WITHOUT_DATA
@pytest.mark.usefixtures("no_group")
def test_a_rank_of_64_is_planned_without_the_others() -> None:
    whole = train(mesh_of(0, 64), None)
    assert whole.recording is not None
    assert whole.timeline is not None
    least, most = least_bytes(whole.recording), whole.recording.peak_bytes
    assert least < most
    planned = train(mesh_of(0, 64), (least + most) // 2)
    assert planned.plan is not None
    assert planned.plan.offloaded_bytes
    assert planned.timeline is not None
    assert planned.timeline.peak_bytes <= (least + most) // 2


@GATHERS_WITHOUT_DATA
@pytest.mark.usefixtures("no_group")
def test_the_first_and_the_last_of_64_ranks_have_one_step() -> None:
    first, last = (train(mesh_of(rank, 64), None).recording for rank in (0, 63))
    assert first is not None
    assert last is not None
    assert order_of(first) == order_of(last)
    assert first.peak_bytes == last.peak_bytes


@GATHERS_WITHOUT_DATA
@pytest.mark.usefixtures("no_group")
def test_more_ranks_leave_more_room_for_activations() -> None:
    """Parameters, gradients and two moments, of 4 bytes each, are sharded; gathered parameters are released again."""
    resident = []
    for ranks in (2, 64):
        recording = train(mesh_of(0, ranks), None).recording
        assert recording is not None
        resident.append(recording.resident_bytes)
    parameters = LAYERS * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)
    spread = 4 * 4 * parameters
    assert resident[0] - resident[1] == spread // 2 - spread // 64


def test_a_storage_that_its_owner_resizes_is_counted_as_it_is() -> None:
    """FSDP2 releases gathered parameters in this way, without an operation."""
    resize = torch.UntypedStorage.resize_
    with vdnn.VirtualMachine("h100", fake=False) as machine:
        gathered = torch.empty(256)
        before = machine.allocated_bytes
        gathered.untyped_storage().resize_(0)
        assert machine.allocated_bytes == before - 1024
        gathered.untyped_storage().resize_(1024)
        assert machine.allocated_bytes == before
    assert torch.UntypedStorage.resize_ is resize
