"""Integrity mode compares reloaded storages with the bytes that were offloaded; a single wrong bit is an error."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import vdnn
from tests.runtime.conftest import OpenSession
from tests.runtime.rigs.networks import conv_chain, images, perceptron, small_resnet
from tests.runtime.rigs.side_by_side import assert_same_as_plain
from vdnn import _C
from vdnn.errors import IntegrityError
from vdnn.runtime.session.session import Session


def checked(session: Session) -> tuple[int, int]:
    """The number of storages compared, and of those that differ."""
    (check,) = session._engine.checks()
    return check.compared, check.failed


@pytest.mark.parametrize("make", [conv_chain, small_resnet], ids=["chain", "resnet"])
def test_what_moves_correctly_passes(open_session: OpenSession, make: Any) -> None:
    session = open_session(integrity=True)
    model, x = make(), images()
    assert_same_as_plain(session, lambda: _train_step(model, x), model)
    compared, failed = checked(session)
    assert 4 < compared <= session.counters.reloads  # a reload without a use is not compared
    assert failed == 0
    assert f"integrity: {compared} storages compared, 0 differ" in session.report()


def _train_step(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().sum()
    loss.backward()
    return loss


def corrupt_host_memory(session: Session, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Flips one bit of the `at`-th host copy, after the offload is complete and before the reload."""
    (transport,) = [one for one in session._engine.transports.values() if one is not None]
    reload, made = transport.queue.reload, []

    class Queue:
        """The real queue, except for one reload."""

        def __getattr__(self, name: str) -> Any:
            return getattr(queue, name)

        def reload(self, copy: _C.HostCopy, *arguments: Any, **options: Any) -> Any:
            if len(made) == at:
                transport.device.synchronize(queue.ready(copy))
                byte = ctypes.c_uint8.from_address(copy.block.address + copy.bytes // 2)
                byte.value ^= 0x10
            made.append(copy)
            return reload(copy, *arguments, **options)

    queue = transport.queue
    monkeypatch.setattr(transport, "queue", Queue())


@pytest.mark.parametrize("at", [0, 2])
def test_one_bit_that_flips_on_the_way_is_an_error(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    session = vdnn.offload(device="sim", min_bytes=0, integrity=True, limits=vdnn.Limits(offload_window=1))
    model, x = perceptron(32, 4), torch.randn(8, 32)
    with session:
        _train_step(model, x)
    assert checked(session)[1] == 0
    corrupt_host_memory(session, monkeypatch, at)
    wrong = pytest.raises(IntegrityError, match="1 storages were reloaded with other bytes than were offloaded, in")
    with wrong, session:
        _train_step(model, x)
    assert checked(session)[1] == 1
    monkeypatch.undo()
    with session:  # the next step is compared anew
        _train_step(model, x)
    assert checked(session)[1] == 1
    session.close()


def test_the_same_bit_goes_unseen_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the test above passes because of integrity mode and not for another reason."""
    session = vdnn.offload(device="sim", min_bytes=0, limits=vdnn.Limits(offload_window=1))
    model, x = perceptron(32, 4), torch.randn(8, 32)
    with session:
        _train_step(model, x)
    corrupt_host_memory(session, monkeypatch, 0)
    with session:
        _train_step(model, x)
    assert session._engine.checks() == []
    monkeypatch.undo()
    session.close()


def test_an_optimizers_step_is_where_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    session = vdnn.offload(device="sim", min_bytes=0, integrity=True, limits=vdnn.Limits(offload_window=1))
    model, x = perceptron(32, 4), torch.randn(8, 32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with session:
        _train_step(model, x)
        optimizer.step()
        corrupt_host_memory(session, monkeypatch, 1)
        _train_step(model, x)
        with pytest.raises(IntegrityError, match="in step 2"):
            optimizer.step()
    monkeypatch.undo()
    session.close()


def test_a_slice_at_an_odd_offset_is_hashed_too() -> None:
    session = vdnn.offload(device="sim", min_bytes=0, integrity=True, limits=vdnn.Limits(offload_window=1))
    x = torch.randn(1001, requires_grad=True)
    with session:
        whole = x.tanh()
        (whole[501:601].exp() * whole[1:3].prod()).sum().backward()
    assert checked(session)[0] > 0
    session.close()
