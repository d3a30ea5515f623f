"""A session says once that it cannot see something: threads that did not enter it, tensors that it passes through."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import vdnn
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.offload import offload
from vdnn.user_warnings import VdnnWarning

ELSEWHERE = r"Sequential is called on a thread that has not entered the session\. .*Enter the same session there"
NOTHING = r"2 steps of optimizers ran inside the session, and nothing was saved in it"


@contextlib.contextmanager
def _said_once(expected: str) -> Iterator[None]:
    """The only warning of vdnn in the block."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    (said,) = [str(one.message) for one in seen if issubclass(one.category, VdnnWarning)]
    assert re.search(expected, said), said


class Training:
    def __init__(self) -> None:
        layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def loss(self, x: torch.Tensor | None = None) -> torch.Tensor:
        return self.model(torch.randn(64, 32) if x is None else x).square().mean()  # type: ignore[no-any-return]

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.loss().backward()
        self.update()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def _on_a_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


async def _by_asyncio(work: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(work)


@pytest.mark.parametrize("elsewhere", [_on_a_thread, lambda work: asyncio.run(_by_asyncio(work))], ids=["pool", "task"])
def test_a_forward_on_a_thread_that_did_not_enter_is_said_once(elsewhere: Callable[[Callable[[], Any]], Any]) -> None:
    training = Training()
    with _said_once(ELSEWHERE), offload(device="sim", min_bytes=0):
        for _ in range(3):
            elsewhere(training.loss).backward()
            training.update()


def test_with_a_budget_the_same_is_said() -> None:
    training = Training()
    with VirtualMachine("h100", fake=False) as machine, _said_once(ELSEWHERE):
        for _ in range(3):  # sessions that share an engine
            with offload(budget="1MiB", device=machine, min_bytes=0):
                _on_a_thread(training.loss).backward()
                training.update()


@pytest.mark.filterwarnings("error")
def test_a_thread_that_entered_the_session_is_seen(pool: ThreadPoolExecutor) -> None:
    training = Training()
    with offload(device="sim", min_bytes=0) as session:

        def loss() -> torch.Tensor:
            with session:
                return training.loss()

        for _ in range(3):
            pool.submit(loss).result().backward()
            training.update()
    assert session.counters.storages > 0
    session.close()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "elsewhere",
    [
        lambda training: torch.no_grad()(training.loss)(),
        lambda training: torch.inference_mode()(training.loss)(),
        lambda training: offload(device="sim", min_bytes=0)(training.step)(),
        lambda training: vdnn.save_on_cpu(device="sim")(training.step)(),
    ],
    ids=["evaluation", "inference", "another session", "save_on_cpu"],
)
def test_what_others_do_on_threads_of_their_own_is_nothing_to_say(
    elsewhere: Callable[[Training], Any], pool: ThreadPoolExecutor
) -> None:
    training, other = Training(), Training()
    with offload(device="sim", min_bytes=0):
        for _ in range(3):
            training.step()
            pool.submit(elsewhere, other).result()


@pytest.mark.filterwarnings("error")
def test_a_checkpoint_that_recomputes_in_a_backward_elsewhere_is_nothing_to_say(pool: ThreadPoolExecutor) -> None:
    training = Training()
    with offload(device="sim", min_bytes=0):
        for reentrant in (False, True):
            x = torch.randn(8, 32, requires_grad=True)
            loss = checkpoint(training.model, x.tanh(), use_reentrant=reentrant).sum()
            pool.submit(loss.backward).result()


@pytest.mark.filterwarnings("error")
def test_a_session_that_keeps_everything_has_nothing_to_say(pool: ThreadPoolExecutor) -> None:
    training = Training()
    with offload("keep", device="sim"):
        for _ in range(3):
            pool.submit(training.step).result()


def test_steps_of_an_optimizer_elsewhere_are_said(pool: ThreadPoolExecutor) -> None:
    training = Training()
    expected = r"SGD steps on a thread that has not entered the session, .*Call session\.step\(\)"
    with _said_once(expected), offload(device="sim", min_bytes=0):
        for _ in range(4):
            training.loss().backward()
            pool.submit(training.update).result()


@pytest.mark.filterwarnings("error")
def test_steps_elsewhere_that_the_program_marks_are_nothing_to_say(pool: ThreadPoolExecutor) -> None:
    training = Training()
    with offload(device="sim", min_bytes=0) as session:
        for _ in range(4):
            training.loss().backward()
            pool.submit(training.update).result()
            session.step()
    assert session.num_steps == 4


def test_a_session_around_the_optimizer_alone_is_said() -> None:
    trainings = [Training(), Training()]
    losses = [training.loss() for training in trainings]
    with _said_once(NOTHING), offload(device="sim", min_bytes=0):
        for training, loss in zip(trainings, losses, strict=True):
            loss.backward()
            training.update()


def test_functions_on_a_thread_that_did_not_enter_are_said_at_the_exit(pool: ThreadPoolExecutor) -> None:
    """No module is called: only the saves are missing."""
    weight = torch.ones(32, 32, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    with _said_once(NOTHING), offload(device="sim", min_bytes=0):
        for _ in range(2):
            pool.submit(lambda: (torch.ones(8, 32) @ weight).tanh().sum()).result().backward()
            optimizer.step()


@pytest.mark.parametrize("is_whole", [False, True], ids=["activations", "whole training"])
def test_a_budget_around_gradients_without_hooks_is_said(is_whole: bool) -> None:
    """torch.func bypasses hooks, so no step can be held within its budget."""
    machine = VirtualMachine("h100", fake=False)
    with machine:
        training = Training()
        managed = {"model": training.model, "optimizer": training.optimizer} if is_whole else {}
        with _said_once(NOTHING), offload(device=machine, min_bytes=0, budget="100KiB", **managed):  # type: ignore[arg-type]
            for _ in range(2):
                parameters = {name: one.detach() for name, one in training.model.named_parameters()}

                def loss(given: Any) -> torch.Tensor:
                    return torch.func.functional_call(training.model, given, torch.ones(64, 32)).square().mean()  # type: ignore[no-any-return]

                for name, gradient in torch.func.grad(loss)(parameters).items():
                    training.model.get_parameter(name).grad = gradient
                training.update()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("options", [{"optimizer": True}, {"policy": "keep"}], ids=["state", "keep"])
def test_a_session_for_the_state_alone_is_nothing_to_say(options: dict[str, Any]) -> None:
    training = Training()
    if "optimizer" in options:
        options = {"optimizer": training.optimizer}
    for _ in range(3):
        training.loss().backward()
        with offload(device="sim", min_bytes=0, **options):
            training.update()


# Tensors that pass through.


class Named(torch.Tensor):
    """A subclass without memory of its own kind."""


class Wrapper(torch.Tensor):
    """A subclass around another tensor, which has the memory."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda one: one.inner if isinstance(one, Wrapper) else one, (args, kwargs or {}))
        return tree_map(lambda one: Wrapper(one) if isinstance(one, torch.Tensor) else one, func(*args, **kwargs))


PASSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "subclass": lambda tensor: tensor.as_subclass(Named),
    "wrapper": Wrapper,
    "nested": lambda tensor: torch.nested.nested_tensor([tensor[:40], tensor[40:]], layout=torch.jagged),
}


@pytest.mark.parametrize("kind", PASSED)
def test_steps_whose_tensors_pass_through_count_over_their_budget(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    with warnings.catch_warnings(), VirtualMachine("h100", fake=False) as machine:
        warnings.simplefilter("ignore")  # that nothing was offloaded, and that nested tensors are a prototype
        with offload(budget="60KiB", device=machine, min_bytes=0) as session:
            peaks = []
            for _ in range(4):
                machine.reset_peak()
                training.loss(PASSED[kind](torch.randn(64, 32))).backward()
                training.update()
                peaks.append(machine.peak_bytes)
    assert min(peaks) > 60 << 10
    assert session.num_steps == 4
    worst = re.search(
        r"0 of 4 steps within, 4 over, worst ([\d.]+) KiB \(4 saved only tensors that pass", session.report()
    )
    assert worst is not None
    assert float(worst[1]) <= max(peaks) / 1024 + 0.01
    assert float(worst[1]) > 60
    assert caplog.text.count("saved only tensors that pass through") == 1


def test_steps_within_their_budget_whose_tensors_pass_through_are_within() -> None:
    training = Training()
    machine = VirtualMachine("h100", fake=False)
    session = offload(budget="10MiB", device=machine, min_bytes=0)
    with machine, _said_once("none of 36 saves was offloaded"), session:
        for _ in range(3):
            training.loss(torch.randn(64, 32).as_subclass(Named)).backward()
            training.update()
    assert "budget 10.00 MiB: all of 3 steps within" in session.report()


def test_a_step_that_passes_some_through_is_planned_as_always() -> None:
    training = Training()

    def step() -> None:
        kept = training.model[:2](torch.randn(64, 32).as_subclass(Named))
        training.model[2:](kept.as_subclass(torch.Tensor)).square().mean().backward()
        training.update()

    machine = VirtualMachine("h100", fake=False)
    with machine, offload(budget="95%", device=machine, min_bytes=0) as session:
        for _ in range(4):
            step()
    assert session.plan is not None
    assert session.num_steps == 4
    assert "pass through" not in "".join(line for line in session.report().splitlines() if "budget" in line)


def test_a_batch_of_a_subclass_in_between_counts_as_a_step_of_its_own() -> None:
    training = Training()
    machine = VirtualMachine("h100", fake=False)
    with machine, offload(budget="10MiB", device=machine, min_bytes=0) as session:
        for number in range(6):
            x = torch.randn(64, 32)
            training.loss(x.as_subclass(Named) if number == 3 else x).backward()
            training.update()
    assert session.num_steps == 6
    assert "all of 6 steps within" in session.report()


def test_threads_that_end_are_no_longer_known() -> None:
    """A later thread may get the number of one that entered a session."""
    training = Training()
    session = offload(device="sim", min_bytes=0)
    for _ in range(3):
        thread = threading.Thread(target=session(training.step))
        thread.start()
        thread.join()
    assert session._engine._entries == []
    session.close()
