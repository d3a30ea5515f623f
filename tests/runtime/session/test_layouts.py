"""Every dtype and layout is reloaded unchanged: bits, dtype, size, strides, and the conjugate and negative bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.conftest import OpenSession
from tests.runtime.rigs.lives import one_backward
from tests.runtime.rigs.networks import conv_chain, images, small_resnet
from tests.runtime.rigs.side_by_side import assert_same_as_plain, same_bits
from vdnn import _C
from vdnn.runtime.session.limits import Limits
from vdnn.runtime.session.offload import offload
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.counters import Kept

Make = Callable[[], torch.Tensor]


class Saves(torch.autograd.Function):
    """Saves any tensor for the backward of a trigger, and collects what that backward gets."""

    back: list[torch.Tensor]

    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return trigger.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        Saves.back += ctx.saved_tensors
        return gradient, None


class Operations(TorchDispatchMode):
    """Collects the names of the operations that torch runs while this mode is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._overloadpacket.__name__)
        return func(*args, **kwargs or {})


def round_trip(session: Session, make: Make) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results of `make`: an original, and one that was reloaded from the host. The session's window must be one
    byte."""
    Saves.back = []
    trigger = torch.zeros((), requires_grad=True)
    expected = make()
    with session:
        out = Saves.apply(trigger, make())
        pushed_out = [torch.ones(1 << 10) * trigger for _ in range(3)]
    out.backward()
    del out, pushed_out
    return expected, Saves.back.pop()


def assert_comes_back(session: Session, make: Make) -> torch.Tensor:
    expected, back = round_trip(session, make)
    assert same_bits(expected, back)
    assert back.stride() == expected.stride()
    assert (back.is_conj(), back.is_neg()) == (expected.is_conj(), expected.is_neg())
    assert back.type() == expected.type()
    assert session.counters.reloads, "it never left the device"
    return back


def base() -> torch.Tensor:
    return torch.arange(4 * 6 * 8, dtype=torch.float32).view(4, 6, 8)


def complex_base() -> torch.Tensor:
    return torch.complex(base(), base() + 0.5)


LAYOUTS: dict[str, Make] = {
    "contiguous": base,
    "transposed": lambda: base().transpose(0, 2),
    "channels_last": lambda: base().view(2, 2, 6, 8).contiguous(memory_format=torch.channels_last),
    "channels_last_3d": lambda: base().view(1, 2, 2, 6, 8).contiguous(memory_format=torch.channels_last_3d),
    "offset": lambda: base()[1:, 2:],
    "stepped": lambda: base()[::2, ::3, 1::2],
    "one row": lambda: base()[2, 3],
    "one number": lambda: base()[2, 3, 4],
    "diagonal": lambda: base()[0].diagonal(),
    "overlapping windows": lambda: base().flatten().unfold(0, 5, 2),
    "expanded": lambda: base()[0, :1].expand(50, 8),
    "broadcast scalar": lambda: torch.full((), 3.0).expand(9, 9),
    "as many bytes as its storage, all the first": lambda: torch.arange(8.0)[:1].expand(8),
    "as many bytes as its storage, all the fourth": lambda: torch.arange(8.0)[3:4].expand(8),
    "one row with a stride of its own": lambda: torch.arange(4.0).as_strided((1, 4), (100, 1)),
    "conjugate": lambda: complex_base().conj(),
    "transposed conjugate": lambda: complex_base()[0].conj().t(),
    "negative": lambda: complex_base().conj().imag,
    "real part": lambda: complex_base().real,
    "viewed as bytes": lambda: base().view(torch.uint8)[..., 3:11],
    "bytes viewed as halves": lambda: base().view(torch.uint8)[1, 1, 2:10].view(torch.float16),
    "inputs of a larger storage": lambda: torch.arange(10000.0)[17:29],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_comes_back_as_it_left(open_session: OpenSession, name: str) -> None:
    assert_comes_back(open_session(offload_window=1), LAYOUTS[name])


@pytest.mark.parametrize(
    ("name", "is_whole"), [("contiguous", True), ("channels_last", True), ("transposed", False), ("offset", False)]
)
def test_what_was_saved_whole_comes_back_as_one_tensor(open_session: OpenSession, name: str, is_whole: bool) -> None:
    """A whole save is copied into the tensor that the use gets. For any other save a view has to be made."""
    with Operations() as operations:
        assert_comes_back(open_session(offload_window=1), LAYOUTS[name])
    assert ("set_" not in operations.names) is is_whole


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.complex64, torch.complex128, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    ],
    ids=str,
)
def test_a_dtype_comes_back_bit_for_bit(open_session: OpenSession, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (48,), dtype=torch.uint8)
    assert_comes_back(open_session(offload_window=1), lambda: raw.clone().view(dtype))


def test_an_expanded_tensor_is_not_made_large(open_session: OpenSession) -> None:
    session = open_session(offload_window=1)
    back = assert_comes_back(session, lambda: torch.arange(8.0)[:, None].expand(8, 1000))
    # Eight numbers for the expanded tensor, and two of the three tensors that pushed it out of the window.
    assert session.counters.storage_bytes == 8 * 4 + 2 * 4096
    assert back.untyped_storage().nbytes() <= 8 * 4 + 64


def test_of_a_large_storage_only_the_part_in_use_is_copied(open_session: OpenSession) -> None:
    session = open_session(offload_window=1)
    back = assert_comes_back(session, lambda: torch.arange(100000.0)[500:600])
    assert session.counters.storage_bytes == 100 * 4 + 2 * 4096
    assert back.untyped_storage().nbytes() <= 100 * 4 + 64


def test_two_slices_of_one_large_storage_are_two_parts(session: Session) -> None:
    x = torch.randn(1000, requires_grad=True)

    def step() -> torch.Tensor:
        large = x.exp()
        # exp saves the whole result, so the clone gives the slices a graph in which nothing else is saved.
        small = large.detach().clone()
        loss = (small[10:30] * x[10:30]).sum() + (small[500:540] * x[:40]).sum() + (small[15:20] * x[:5]).sum()
        (loss + large.sum()).backward()
        return loss

    assert_same_as_plain(session, step, x)


def test_an_empty_tensor_has_nothing_to_move(session: Session) -> None:
    x = torch.randn(0, 4, requires_grad=True)
    weight = torch.randn(4, 4, requires_grad=True)
    with session:
        (x.exp() @ weight.exp()).sum().backward()
    assert session.counters.kept[Kept.SMALL] >= 2
    assert x.grad is not None
    assert x.grad.shape == (0, 4)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # before torch 2.13
def test_a_sparse_tensor_passes_through(session: Session) -> None:
    values = torch.randn(5, requires_grad=True)
    dense = torch.randn(6, 3, requires_grad=True)

    def step() -> torch.Tensor:
        indices = torch.tensor([[0, 1, 2, 3, 4], [1, 0, 5, 2, 3]])
        matrix = torch.sparse_coo_tensor(indices, values * 2, (6, 6), check_invariants=True)
        loss = torch.sparse.mm(matrix, dense.exp()).square().sum()
        loss.backward()
        return loss

    assert_same_as_plain(session, step, values, dense)
    assert session.counters.kept[Kept.SUBCLASS] > 0


@pytest.mark.parametrize("make", [conv_chain, small_resnet], ids=["chain", "resnet"])
def test_channels_last_models_are_the_same_as_plain(session: Session, make: Callable[[], nn.Module]) -> None:
    model = make().to(memory_format=torch.channels_last)
    x = images().contiguous(memory_format=torch.channels_last)

    assert_same_as_plain(session, partial(one_backward, model, x), model)


SHARED = offload(
    device=_C.OrderingChecker(_C.SimDevice(schedule=_C.Schedule.LAZY)),
    min_bytes=0,
    limits=Limits(offload_window=1, reload_window=1),
)
DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_any_strided_view_comes_back_as_it_left(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    length = data.draw(st.integers(1, 400))
    dimensions = data.draw(st.integers(0, 4))
    sizes, strides = [], []
    offset = data.draw(st.integers(0, length - 1))
    room = length - 1 - offset
    for _ in range(dimensions):
        stride = data.draw(st.integers(0, 30))
        size = data.draw(st.integers(1, 5 if stride == 0 else min(5, 1 + room // stride)))
        room -= (size - 1) * stride
        sizes.append(size)
        strides.append(stride)
    raw = torch.arange(length * dtype.itemsize, dtype=torch.int64).remainder(2 if dtype is torch.bool else 251)

    def make() -> torch.Tensor:
        return raw.to(torch.uint8).view(dtype).as_strided(sizes, strides, offset)

    expected, back = round_trip(SHARED, make)
    assert same_bits(expected, back)
    assert back.stride() == expected.stride()
