"""Tensors without plain memory of their own: one predicate recognizes them, and they are kept and released with their
graph.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import vdnn
from tests.runtime.conftest import OpenSession
from vdnn import _C
from vdnn.runtime.session.session import active_session
from vdnn.runtime.storage.counters import Counters, Kept
from vdnn.runtime.storage.facts import StorageFacts
from vdnn.runtime.storage.managed_storage import ManagedStorage
from vdnn.runtime.storage.transport import Transport, TransportOptions
from vdnn.runtime.torch_internals.tensor_kinds import has_plain_storage, is_traced, storage_of

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")

UNUSUAL: dict[str, Callable[[], torch.Tensor]] = {
    "a zero of forward mode": lambda: torch._efficientzerotensor((4, 4)),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "opaque": lambda: torch.randn(4, 4).to_mkldnn(),
    "meta": lambda: torch.randn(4, device="meta"),
}


@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz.*")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_it_is_not_taken_for_plain_memory_and_may_be_marked(kind: str) -> None:
    tensor = UNUSUAL[kind]()
    assert not has_plain_storage(tensor)
    assert vdnn.keep(tensor) is tensor


@pytest.mark.parametrize("transform", [vmap, functionalize, lambda f: grad(lambda x: f(x).sum())])
def test_what_torch_func_wraps_is_not_taken_for_plain_memory(transform: Callable[..., Callable[..., object]]) -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(has_plain_storage(x))
        storage_of(x)  # does not raise
        return x * 2

    transform(function)(torch.randn(4, 4))
    assert seen == [False]


def test_a_tracer_is_seen_and_a_fake_mode_is_none() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_traced())
        return x * 2

    make_fx(function)(torch.randn(4))
    with FakeTensorMode():
        function(torch.randn(4))
    with vdnn.VirtualMachine("titan-x"):
        function(torch.randn(4))
    function(torch.randn(4))
    assert seen == [True, False, False, False]


def test_plain_tensors_of_all_kinds_are_plain_memory() -> None:
    conjugate = torch.randn(4, dtype=torch.complex64).conj()
    with FakeTensorMode():
        fake = torch.randn(4)
    for tensor in (torch.randn(4), torch.nn.Parameter(torch.randn(4)), conjugate, torch.randn(4, 4).t(), fake):
        assert has_plain_storage(tensor)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_managed_storage_whose_making_failed_goes_without_a_word() -> None:
    device = _C.SimDevice()
    transport = Transport(torch.device("cpu"), device, TransportOptions())
    tensor, stream = torch.empty(16), transport.current_stream()
    geometry = (tensor.dtype, tensor.size(), tensor.stride())
    facts = StorageFacts(tensor.data_ptr(), 0, tensor.nbytes, stream, geometry, True, None, Counters())
    with torch.inference_mode():
        without_version = torch.empty(0)
    with pytest.raises(RuntimeError, match="version counter"):
        ManagedStorage(transport, tensor.untyped_storage(), facts, without_version)
    gc.collect()
    transport.close()
    device.close()


def test_nested_outputs_go_with_a_graph_that_never_runs_backward(open_session: OpenSession) -> None:
    session = open_session("vdnn-all")
    with session:
        nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], requires_grad=True)
        out = (nested * 2).softmax(-1)
    assert session.counters.kept[Kept.SUBCLASS]
    gone = weakref.ref(out)
    del out, nested
    gc.collect()
    assert gone() is None


def test_a_nested_tensor_that_was_written_is_refused(open_session: OpenSession) -> None:
    with open_session("vdnn-all"):
        nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], requires_grad=True)
        out = nested * 2
        loss = torch.nested.to_padded_tensor(out.softmax(-1) * out, 0.0).sum()
        out.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_hooks_are_there_again_behind_a_transform_and_a_trace(open_session: OpenSession) -> None:
    session = open_session("vdnn-all")
    weight = torch.randn(16, 16, requires_grad=True)
    with session:
        for run in (
            lambda: grad(lambda x: (x @ weight).tanh().sum())(torch.randn(4, 16)),
            lambda: make_fx(lambda x: torch.autograd.grad((x @ weight).tanh().sum(), weight)[0])(torch.randn(4, 16)),
        ):
            run()
            saves = session.counters.saves
            (torch.randn(4, 16) @ weight).tanh().sum().backward()
            assert session.counters.saves > saves
        with pytest.raises(ZeroDivisionError):
            grad(lambda x: x.sum() / (1 // 0))(torch.randn(4))
        saves = session.counters.saves
        (torch.randn(4, 16) @ weight).tanh().sum().backward()
        assert session.counters.saves > saves
    assert active_session() is None


def test_hooks_of_somebody_else_are_refused_as_ever(open_session: OpenSession) -> None:
    with (
        open_session("vdnn-all"),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"),
    ):
        grad(lambda x: x.exp().sum())(torch.randn(4))
