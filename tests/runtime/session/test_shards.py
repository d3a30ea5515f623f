"""Saved DTensors: the local part is offloaded and reloaded, and writes that autograd refuses are still refused.

The tests run one rank of two over torch's fake process group. Collectives move nothing, with and without vdnn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import vdnn
from tests.runtime.rigs.side_by_side import alive, same_bits
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.counters import Kept

ROWS, COLUMNS = 32, 16


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.fixture
def session() -> Iterator[Session]:
    session = vdnn.offload(
        "vdnn-all", device="sim", min_bytes=0, limits=vdnn.Limits(offload_window=1, reload_window="1KiB")
    )
    yield session
    assert not alive(session)
    session.close()


def part() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(ROWS, COLUMNS)


def sharded(mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(part(), mesh, [Shard(0)]).requires_grad_()


def plain_and_ours(session: Session, step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    plain = step()
    with session:
        ours = step()
    return plain, ours


def gradient_of(loss: Callable[[DTensor], DTensor], mesh: DeviceMesh) -> torch.Tensor:
    x = sharded(mesh)
    loss(x).sum().backward()
    assert isinstance(x.grad, DTensor)
    return x.grad.to_local().clone()


LOSSES: list[Callable[[DTensor], DTensor]] = [
    lambda x: x.sin().exp(),
    lambda x: x.exp().t().softmax(0),  # a view of the saved tensor
    lambda x: x.exp()[:, 2:9].tanh(),  # a part of a storage
    lambda x: x.exp().double().redistribute(placements=[Replicate()]).sigmoid(),
    lambda x: torch.where(x.exp() > 1, x.sin(), x.cos()) * x.exp(),  # type: ignore[return-value]
]


@pytest.mark.parametrize("number", range(len(LOSSES)))
def test_gradients_are_the_same_and_the_parts_moved(session: Session, mesh: DeviceMesh, number: int) -> None:
    plain, ours = plain_and_ours(session, lambda: gradient_of(LOSSES[number], mesh))
    assert same_bits(plain, ours)
    assert session.counters.storages
    assert Kept.SUBCLASS not in session.counters.kept


def test_what_comes_back_is_the_part_of_the_same_whole(session: Session, mesh: DeviceMesh) -> None:
    x = sharded(mesh)
    with session:
        y = x.sin().exp()
        saved = y.grad_fn._saved_result
        y.sum().backward()
    assert type(saved) is DTensor
    assert (saved.shape, saved.stride()) == ((2 * ROWS, COLUMNS), (COLUMNS, 1))
    assert saved.placements == (Shard(0),)
    assert saved.device_mesh == mesh
    assert same_bits(saved.to_local(), part().sin().exp())


def test_second_derivatives_are_the_same(session: Session, mesh: DeviceMesh) -> None:
    def step() -> torch.Tensor:
        x = sharded(mesh)
        (first,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
        first.square().sum().backward()
        assert isinstance(x.grad, DTensor)
        return x.grad.to_local().clone()

    assert same_bits(*plain_and_ours(session, step))
    assert session.counters.storages


def test_parameters_stay(session: Session, mesh: DeviceMesh) -> None:
    layer = nn.Linear(COLUMNS, COLUMNS, bias=False)
    layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), mesh, [Replicate()]))
    hidden = sharded(mesh).sin()
    with session:
        loss = layer(hidden).sum()
    assert session.counters.kept[Kept.PARAMETER] == 1  # the weight, transposed
    assert session.counters.storage_bytes == 4 * ROWS * COLUMNS  # the input of the layer
    loss.backward()


def test_layers_that_wrap_one_input_each_share_one_copy(session: Session, mesh: DeviceMesh) -> None:
    """Like the layers for q, k and v. An operation on plain tensors before them saves the same tensor as its result."""
    hidden = part().requires_grad_().exp
    with session:
        made = hidden()
        wrapped = [DTensor.from_local(made, mesh, [Replicate()]) for _ in range(3)]
        loss = sum(((one * one).sum().to_local() for one in wrapped), torch.zeros(()))
        assert session.counters.storages == 1
        assert session.counters.shared_saves == 6
        loss.backward()


MODIFIED = "modified by an inplace operation: .* is at version {}; expected version {} instead"


def test_a_shard_written_through_its_wrapper_is_refused_at_the_use(session: Session, mesh: DeviceMesh) -> None:
    """The local part does not have the new version: only the wrapper shows the write."""
    x = sharded(mesh)
    with session:
        y = x.exp()
        loss = y.sin().sum()
        y.mul_(2)
        with pytest.raises(RuntimeError, match=MODIFIED.format(1, 0)):
            loss.backward()
    del loss, y


def test_a_shard_whose_part_is_written_is_refused_at_the_use(session: Session, mesh: DeviceMesh) -> None:
    x = sharded(mesh)
    with session:
        y = x.exp()
        loss = y.sin().sum()
        with torch.no_grad():
            y._local_tensor.mul_(2)
        with pytest.raises(RuntimeError, match=MODIFIED.format(1, 0)):
            loss.backward()
    del loss, y


def test_a_shard_that_is_written_before_it_is_saved_comes_back_as_written(session: Session, mesh: DeviceMesh) -> None:
    def step() -> torch.Tensor:
        def loss(x: DTensor) -> DTensor:
            y = x * 2
            first = y.sin()  # saves it
            return first.detach() + y.mul_(3).exp()  # saves another version

        return gradient_of(loss, mesh)

    assert same_bits(*plain_and_ours(session, step))


def test_what_a_collective_may_not_have_finished_stays(session: Session, mesh: DeviceMesh) -> None:
    def step() -> torch.Tensor:
        def loss(x: DTensor) -> DTensor:
            late = x.exp().redistribute(placements=[Replicate()], async_op=True)
            assert type(late._local_tensor) is AsyncCollectiveTensor
            return late * late

        return gradient_of(loss, mesh)

    plain, ours = plain_and_ours(session, step)
    assert same_bits(plain, ours)
    assert session.counters.kept[Kept.SUBCLASS] == 2


def test_sums_that_are_yet_to_be_made_come_back_unmade(session: Session, mesh: DeviceMesh) -> None:
    x = DTensor.from_local(part(), mesh, [Partial()]).requires_grad_()
    with session:
        y = x * 2
        loss = (y * DTensor.from_local(part(), mesh, [Replicate()])).to_local().sum()
        loss.backward()
    assert session.counters.storages
    assert isinstance(x.grad, DTensor)
    assert same_bits(x.grad.to_local(), 2 * part())
