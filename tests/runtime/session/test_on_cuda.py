"""The runtime on a GPU gives the bits of plain PyTorch and leaves nothing allocated, under real streams and torch's
allocator.

Every test also runs at small size on a virtual machine on the CPU, which shows that the test itself is right.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import require_cuda
from tests.runtime.rigs.side_by_side import Owner, assert_nothing_alive, differences, outcome
from tests.runtime.rigs.trained_models import MODELS, cnn, deep_cnn, perceptron, transformer
from tests.runtime.rigs.training_places import CudaPlace, Place, VirtualPlace
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.planner import SLACK
from vdnn.step.timeline import Track


@pytest.fixture(params=["virtual", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    place: Place
    if request.param == "cuda":
        require_cuda()
        if not torch.cuda.is_available():
            pytest.skip(f"torch {torch.__version__} sees no GPU")
        place = CudaPlace()
        yield place
        place.close()
        return
    with VirtualMachine("h100", fake=False) as machine:
        place = VirtualPlace(machine)
        yield place
    place.close()


@pytest.fixture(autouse=True)
def _same_sums_each_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_same_as_plain(place: Place, session: Session, step: Callable[[], Any], *owners: Owner) -> None:
    plain = outcome(step, owners)
    offloaded = session.counters.storages
    with session:
        ours = outcome(step, owners)
    assert differences(plain, ours) == []
    assert session.counters.storages > offloaded, session.report()
    place.synchronize()
    assert_nothing_alive(session)


def backward(model: nn.Module, x: torch.Tensor, *, amp: bool = False, **options: Any) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
        loss: torch.Tensor = model(x).float().square().mean()
    loss.backward(**options)  # type: ignore[no-untyped-call]
    return loss


# The same bits.


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "amp"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_plain_ones_with_everything_moved(place: Place, name: str, amp: bool) -> None:
    model, x = MODELS[name](place)
    session = place.open()
    for _ in range(2):  # the second step reuses memory that the first released
        assert_same_as_plain(place, session, lambda: backward(model, x, amp=amp), model)
    assert session.counters.reloads, session.report()


@pytest.mark.parametrize("name", ["cnn", "cnn_channels_last"])
def test_gradients_are_the_plain_ones_with_convolutions_moved(place: Place, name: str) -> None:
    model, x = MODELS[name](place)
    assert_same_as_plain(place, place.open("vdnn-conv"), lambda: backward(model, x), model)


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_back_has_the_hash_of_what_left(place: Place, name: str) -> None:
    model, x = MODELS[name](place)
    session = place.open(integrity=True)
    assert_same_as_plain(place, session, lambda: backward(model, x), model)
    session.step()
    said = re.search(r"integrity: (\d+) storages compared, 0 differ", session.report())
    assert said is not None, session.report()
    # A prefetched reload may be dropped to make room for another.
    assert 0 < int(said[1]) <= session.counters.reloads


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not-reentrant", "reentrant"])
def test_checkpointed_blocks_are_computed_again_alike(place: Place, use_reentrant: bool) -> None:
    model, x = transformer(place)
    x.requires_grad_()

    def step() -> torch.Tensor:
        y = x
        for block in model.children():
            y = checkpoint(block, y, use_reentrant=use_reentrant)
        loss: torch.Tensor = y.square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert_same_as_plain(place, place.open(), step, model, x)


def test_a_graph_that_is_kept_is_used_twice(place: Place) -> None:
    model, x = cnn(place)

    def step() -> torch.Tensor:
        loss = backward(model, x, retain_graph=True)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert_same_as_plain(place, place.open(), step, model)


@pytest.mark.parametrize("name", MODELS)
def test_forward_on_a_side_stream(place: Place, name: str) -> None:
    model, x = MODELS[name](place)

    def step() -> torch.Tensor:
        with place.side_stream():
            loss = model(x).square().mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    assert_same_as_plain(place, place.open(), step, model)


def test_forward_on_two_streams_in_turn(place: Place) -> None:
    """A tensor that one stream allocated is saved on the other, and its memory returns to the stream that allocated
    it."""
    model, x = perceptron(place)

    def step() -> torch.Tensor:
        y = x
        for index, layer in enumerate(model.children()):
            with place.side_stream() if index % 2 else contextlib.nullcontext():
                y = layer(y)
        loss: torch.Tensor = y.square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    session = place.open()
    for _ in range(3):
        assert_same_as_plain(place, session, step, model)


def test_what_another_stream_allocated_is_not_handed_out_before_its_copy_is_done(place: Place) -> None:
    """Plain PyTorch holds `h` until backward. If `h` is released earlier, its memory returns to the stream that
    allocated it, which uses it for the next tensor: that stream must wait for the copy, too."""
    x = torch.randn(place.size * 2**20, device=place.device, requires_grad=True)

    def step() -> torch.Tensor:
        h = x * 2
        with place.side_stream(waits_after=False):
            y = h.sin()
            del h
            y = y.sin()  # the window is full, so h is released
            y = y.sin()
        overwritten = torch.full_like(x, 7.0)
        with place.side_stream():
            loss = (y.sum() + overwritten.detach().sum()).square()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    session = place.open(offload_window=1)
    for _ in range(3):
        assert_same_as_plain(place, session, step, x)


def test_a_whole_step_on_a_side_stream(place: Place) -> None:
    model, x = cnn(place)

    def step() -> torch.Tensor:
        with place.side_stream():
            return backward(model, x)

    assert_same_as_plain(place, place.open(), step, model)


def test_a_step_that_raises_leaves_the_next_one_right(place: Place) -> None:
    model, x = cnn(place)
    session = place.open()

    def stop(*_: object) -> None:
        raise KeyError("amid backward")

    loss = model(x).square().mean()  # made outside of the session, which does not manage its saves
    handle = next(model.parameters()).register_hook(stop)
    with session, pytest.raises(KeyError, match="amid backward"):
        backward(model, x)
    handle.remove()
    model.zero_grad(set_to_none=True)
    loss.backward()
    assert_same_as_plain(place, session, lambda: backward(model, x), model)


# Memory.


def trained(place: Place, model: nn.Module, x: torch.Tensor, session: Session | None = None) -> list[int]:
    """Runs fifty steps. Returns the allocated bytes after the third, when everything lazy is initialized, and after the
    last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    torch.manual_seed(3)
    allocated = []
    with contextlib.nullcontext() if session is None else session:
        for index in range(50):
            backward(model, x)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if index in (2, 49):
                place.synchronize()
                if session is not None:
                    assert_nothing_alive(session)
                allocated.append(place.allocated_bytes())
    return allocated


def parameters(model: nn.Module) -> list[tuple[str, torch.Tensor | None]]:
    return [(name, value.detach().clone()) for name, value in model.state_dict().items()]


@pytest.mark.parametrize("name", ["cnn", "perceptron"])
def test_fifty_steps_end_where_plain_ones_do_and_leave_memory_as_it_was(place: Place, name: str) -> None:
    model, x = MODELS[name](place)
    begin = {key: value.clone() for key, value in model.state_dict().items()}
    trained(place, model, x)
    plain = parameters(model)
    model.load_state_dict(begin)
    early, late = trained(place, model, x, place.open())
    assert differences(plain, parameters(model)) == []
    assert late == early


def test_a_budget_is_kept(place: Place) -> None:
    model, x = deep_cnn(place)

    def step() -> None:
        backward(model, x)

    step()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    plain_peak_bytes = place.peak_bytes_of(step)
    model.zero_grad(set_to_none=True)
    # The workspaces of cuBLAS, one for each stream of the tests before this one, are larger than the step.
    resident_bytes = place.allocated_bytes()
    budget_bytes = resident_bytes + int(0.7 * (plain_peak_bytes - resident_bytes))
    session = place.open("auto", budget=budget_bytes)
    with session:
        for index in range(6):
            peak_bytes = place.peak_bytes_of(step)
            found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            assert all(torch.equal(ours, plain) for ours, plain in zip(found, expected, strict=True))
            del found
            model.zero_grad(set_to_none=True)
            session.step()
            if index >= 2:  # one step to warm up, and one that is recorded
                assert peak_bytes <= budget_bytes < plain_peak_bytes, (index, session.report())
    assert session.plan is not None
    assert session.plan.offloaded_bytes > 0
    assert session.plan.budget_bytes == int(budget_bytes * (1 - SLACK))


def test_a_step_is_measured(place: Place) -> None:
    model, x = deep_cnn(place)
    session = place.open(measure=True)
    with session:
        for _ in range(3):
            backward(model, x)
            session.step()
    timeline = session.timeline
    assert timeline is not None
    assert 0 <= timeline.stall_ns < timeline.step_ns
    # A GPU's clock of events ticks in half microseconds.
    assert min(mark.release_stall_ns for mark in timeline.marks) > -1000
    for track in Track:
        copies = [copy for copy in timeline.copies if copy.track is track]
        assert copies
        assert all(copy.begin_ns <= copy.end_ns for copy in copies)
    assert max(mark.peak_bytes for mark in timeline.marks) == timeline.peak_bytes > 0
    assert session.recording is not None
    assert session.recording.points
