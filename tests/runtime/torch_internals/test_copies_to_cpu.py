"""The methods of torch.Tensor that copy to the CPU, while memory of the host stands for a device."""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Iterator

import pytest
import torch

from vdnn.runtime.torch_internals.copies_to_cpu import stands_for_device

NAMES = ("cpu", "to", "type", "numpy")


def in_the_place_of_a_device() -> torch.Tensor:
    memory = (ctypes.c_char * 32).from_buffer(bytearray(32))
    stands_for_device(ctypes.addressof(memory), memory)
    return torch.frombuffer(memory, dtype=torch.float32)


@pytest.fixture
def tensor() -> Iterator[torch.Tensor]:
    return in_the_place_of_a_device()


def test_methods_are_torchs_own_again_once_the_memory_is_gone() -> None:
    first, second = in_the_place_of_a_device(), in_the_place_of_a_device()
    assert all(name in vars(torch.Tensor) for name in NAMES)
    del first
    assert all(name in vars(torch.Tensor) for name in NAMES)
    view = second[1:]
    del second
    assert view.cpu() is not view
    del view
    assert not any(name in vars(torch.Tensor) for name in NAMES)


def test_what_asks_for_the_cpu_gets_a_copy(tensor: torch.Tensor) -> None:
    other = torch.zeros(1)
    copies = [tensor.cpu(), tensor.to("cpu"), tensor.to(torch.device("cpu")), tensor.to(device="cpu")]
    copies += [tensor.to(other), tensor.type("torch.FloatTensor"), torch.from_numpy(tensor.numpy(force=True))]
    copies += [tensor[2:].cpu(), tensor.detach().view(2, 4).to("cpu", torch.float32), tensor.to("cpu", copy=True)]
    tensor.fill_(1)
    assert all(not one.any() for one in copies)


def test_what_asks_for_no_device_gets_the_same_memory(tensor: torch.Tensor) -> None:
    same = [tensor.to(torch.float32), tensor.float(), tensor.to(tensor), tensor.type(torch.float32), tensor.to()]
    assert all(one is tensor for one in same)
    assert tensor.type() == "torch.FloatTensor"
    assert tensor.numpy().ctypes.data == tensor.data_ptr()


def test_other_tensors_are_as_before(tensor: torch.Tensor) -> None:
    other = torch.ones(4)
    assert other.cpu() is other
    assert other.to("cpu") is other
    assert other.type("torch.FloatTensor") is other
    assert other.numpy(force=True).ctypes.data == other.data_ptr()
    sparse, meta = torch.eye(3).to_sparse(), torch.empty(2, device="meta")
    assert sparse.cpu() is sparse
    assert meta.to("meta") is meta
    with pytest.raises(RuntimeError, match="Invalid device string"):
        other.to("no device")


def test_copies_have_gradients(tensor: torch.Tensor) -> None:
    leaf = tensor.requires_grad_()
    leaf.cpu().sum().backward()
    assert leaf.grad is not None
    assert bool((leaf.grad == 1).all())


def test_a_parameter_is_saved_as_without(tensor: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(tensor)
    assert torch.equal(pickle.loads(pickle.dumps(parameter)), parameter)
    file = io.BytesIO()
    torch.save({"weight": parameter.detach()}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["weight"], parameter)


def test_compiled_code_converts_as_before(tensor: torch.Tensor) -> None:
    def convert(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float64).cpu().to("cpu").type(torch.float32) + x.cpu()

    compiled = torch.compile(convert, backend="eager", fullgraph=True)
    x = torch.randn(3)
    assert torch.equal(compiled(x), convert(x))
