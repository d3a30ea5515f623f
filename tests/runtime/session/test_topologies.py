"""Graphs that fork, join and reuse: the same bits as plain, and one copy per storage version, however often it is
saved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.runtime.conftest import EITHER_WAY, OpenSession
from tests.runtime.rigs.lives import one_backward
from tests.runtime.rigs.networks import Dense, Inception, Residual, UNet, conv_chain, images, perceptron
from tests.runtime.rigs.side_by_side import assert_nothing_alive, assert_same_as_plain
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.counters import Kept

pytestmark = EITHER_WAY

Forward = Callable[[], torch.Tensor]


class Siamese(nn.Module):
    """Applies the same weights to two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cosine_similarity(self.trunk(x), self.trunk(x.flip(0)))


class Tied(nn.Module):
    """A model whose embedding is its output layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.trunk = perceptron(depth=1)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.trunk(self.embedding(x)))
        return out


class Reused(nn.Module):
    """One cell, applied five times to its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros_like(x)
        for _ in range(5):
            hidden = (self.cell(hidden) + x).tanh()
        return hidden


class Last(nn.Module):
    """A recurrent layer's outputs, without its state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)[0]
        return out


def vectors() -> torch.Tensor:
    return torch.randn(4, 16)


TOPOLOGIES: dict[str, tuple[Callable[[], nn.Module], Forward]] = {
    "residual": (lambda: nn.Sequential(Residual(3, 3), Residual(3, 6, stride=2)), images),
    "dense": (Dense, images),
    "inception": (Inception, images),
    "u-net": (UNet, images),
    "siamese": (Siamese, vectors),
    "lstm": (lambda: Last(nn.LSTM(16, 8, num_layers=2, dropout=0.3)), lambda: torch.randn(5, 2, 16)),
    "gru": (lambda: Last(nn.GRU(16, 8, bidirectional=True)), lambda: torch.randn(5, 2, 16)),
    "recurrent reuse": (Reused, vectors),
    "tied": (Tied, lambda: torch.arange(20)[None]),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), lambda: torch.randn(2, 6, 16)),
}


def storage_versions_saved(forward: Forward, model: nn.Module) -> list[int]:
    """The bytes of each storage version that autograd saves, as seen by hooks of the test. Weights and empty storages
    are left out."""
    weights = {weight.untyped_storage()._cdata for weight in [*model.parameters(), *model.buffers()]}
    held = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        held.append((tensor.untyped_storage(), tensor._version))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    seen = {(storage._cdata, version): len(storage) for storage, version in held if storage._cdata not in weights}
    return [size for size in seen.values() if size]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_topology_is_the_same_as_plain_with_one_copy_per_storage_version(session: Session, name: str) -> None:
    model, x = TOPOLOGIES[name][0](), TOPOLOGIES[name][1]()

    assert_same_as_plain(session, partial(one_backward, model, x), model)
    saved = storage_versions_saved(lambda: model(x).square().sum(), model)
    with session:
        loss = model(x).square().sum()
        copies = [managed.nbytes for managed in session._engine.saves.managed]
        if name == "attention":  # queries, keys and values share one storage, and each part in use is copied separately
            assert sum(copies) < sum(saved)
        # its three gates share a storage but no version counter: the runtime cannot be sure, and copies each
        elif name == "gru":
            assert sum(saved) < sum(copies) < 3 * sum(saved)
        else:
            assert sorted(copies) == sorted(saved)
    del loss
    assert_nothing_alive(session)


def test_a_chain_moves_exactly_the_bytes_that_its_layers_save(open_session: OpenSession) -> None:
    session = open_session("vdnn-all", offload_window=1)
    images_, channels = 2, 4
    model, x = conv_chain(channels), images(images_)
    with session:
        loss = model(x).square().sum()
        # one more hook call issues the copies that waited for their operation to finish
        torch.ones(()).mul(torch.ones((), requires_grad=True))
    plane, pooled = images_ * channels * 8 * 8 * 4, images_ * channels * 4 * 4
    expected = [
        images_ * 3 * 8 * 8 * 4,  # convolution: its input, the images
        plane,  # batch norm: its input
        channels * 4,  # batch norm: the batch's mean
        channels * 4,  # batch norm: its inverse deviation
        plane,  # ReLU: its result, which the second convolution saves as its input
        plane,  # the second ReLU: its result, which pooling saves as its input
        pooled * 8,  # pooling: indices, int64
        pooled * 4,  # classifier: its input, the pooled planes through a view
        images_ * 5 * 4,  # square: its input
    ]
    assert session.counters.storage_bytes == sum(expected)
    assert session.counters.storages == len(expected)
    assert session.counters.shared_saves == 2  # the result of each ReLU
    # The images and the last save stay: the test holds the images, and nothing was offloaded after the last save.
    assert session.counters.copied_not_freed_bytes == expected[0]
    assert session.counters.freed_bytes == sum(expected[1:-1])
    loss.backward()


def test_a_storage_is_released_after_its_last_forward_consumer(open_session: OpenSession) -> None:
    session = open_session(offload_window=1)
    weights = [torch.ones(64, requires_grad=True) for _ in range(6)]
    with session:
        hidden = torch.randn(64)
        held = StorageWeakRef(hidden.untyped_storage())
        results = []
        for index, weight in enumerate(weights[:4]):
            results.append(hidden * weight)  # each saves `hidden`, which is copied once and stays while it is needed
            assert not held.expired(), f"gone before consumer {index}"
        del hidden
        assert (session.counters.storages, session.counters.shared_saves) == (1, 3)
        # needs the window, and so waits for the copy to finish
        results += [torch.randn(64) * weight for weight in weights[4:]]
        results.append(torch.randn(64) * weights[0])
        assert held.expired(), "it was copied, and nobody needs it"
    torch.stack(results).sum().backward()
    del results


def test_two_versions_of_one_storage_are_two_copies(open_session: OpenSession) -> None:
    session = open_session(offload_window=1)
    a, b = torch.randn(64, requires_grad=True), torch.randn(64, requires_grad=True)
    filler = torch.ones((), requires_grad=True)
    with session:
        x = torch.linspace(0, 1, 64)
        first = x * a  # saves version 0, which is then overwritten: its backward must refuse
        others = [torch.ones(64) * filler for _ in range(2)]
        x.add_(1)
        expected = x.clone()
        second = x * b  # saves version 1
        del x
        others += [torch.ones(64) * filler for _ in range(4)]
    second.sum().backward()
    assert b.grad is not None
    assert torch.equal(b.grad, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: .* is at version 1; expected version 0"):
        first.sum().backward()
    del first, second, others


def test_a_storage_saved_under_two_version_counters_is_right_under_both(open_session: OpenSession) -> None:
    session = open_session(offload_window=1)
    a, b = torch.randn(64, requires_grad=True), torch.randn(64, requires_grad=True)
    filler = torch.ones((), requires_grad=True)
    with session:
        x = torch.randn(64)
        expected = x.clone()
        first = x * a
        others = [torch.ones(64) * filler for _ in range(2)]
        second = x.data * b  # .data starts a version counter of its own on the same bytes
        del x
        others += [torch.ones(64) * filler for _ in range(4)]
    (first.sum() + second.sum()).backward()
    for leaf in (a, b):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, expected)
    del first, second, others


def test_detached_aliases_share_one_copy(session: Session) -> None:
    a = torch.randn(64, requires_grad=True)

    def step() -> torch.Tensor:
        x = a.exp()
        loss = (x * x.detach() * x.view(8, 8).flatten().detach()).sum()
        loss.backward()
        return loss

    assert_same_as_plain(session, step, a)
    # exp's result is saved by exp and, through aliases, by both products. A factor that multiplies no variable is not
    # saved.
    assert session.counters.storages == 1
    assert session.counters.shared_saves == 2


def test_weights_that_are_tied_or_views_of_one_buffer_are_kept(session: Session) -> None:
    flat = torch.randn(2 * 256, requires_grad=True)
    x = torch.randn(4, 16, requires_grad=True)

    def step() -> torch.Tensor:
        loss = (x.sin() @ flat[:256].view(16, 16) @ flat[256:].view(16, 16).t()).square().sum()
        loss.backward()
        return loss

    assert_same_as_plain(session, step, flat, x)
    assert session.counters.kept[Kept.PARAMETER] == 3  # the two views, and x itself
