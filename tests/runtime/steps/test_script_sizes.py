"""Steps of sizes that no step had are settled from their second save on, with a script made of those of other sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.rigs.settled_steps import settling_of
from tests.runtime.rigs.virtual_training import recompute_all
from vdnn import _C
from vdnn.planning.footprint import offload_everything
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.script_sizes import ScriptSizes, _Product, _product_of
from vdnn.step.plan import Plan, make_plan

WIDTH, HEADS, LARGEST = 16, 2, (4, 24)
# Counts to which trials add what they read, if Python manages it.
OF_TRIALS = ("uses", "used_in_place", "demand_reloads", "reloaded_bytes")
Sizes = tuple[int, int]  # of a batch: sequences, and the tokens of each


class Block(nn.Module):
    """Attention with its maps, so that sizes grow with the length and with its square."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        query, key, value = self.mix(self.norm(x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = (query @ key.transpose(-1, -2)).softmax(-1)
        y = (self.drop(seen) @ value).transpose(1, 2).reshape(batch, tokens, WIDTH)
        return x + nn.functional.gelu(self.out(y))  # type: ignore[no-any-return]


class Network(nn.Module):
    """`between` changes what passes from block to block."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.between = between

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.between(block(x))
        logits = self.head(x)[:, :-1]
        loss: torch.Tensor = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss


class Training:
    """Steps of any size under one plan, which is made for the largest."""

    def __init__(
        self, machine: VirtualMachine, kind: str, model: nn.Module | None = None, *, min_bytes: int = 0
    ) -> None:
        torch.manual_seed(0)
        self.machine = machine
        self.model = Network() if model is None else model
        self.plan = self._plan(kind, min_bytes)

    def _plan(self, kind: str, min_bytes: int) -> Plan:
        options: dict[str, Any] = {"device": self.machine, "measure": True, "min_bytes": min_bytes}
        recomputes = kind != "offloads"
        with vdnn.offload("keep", recompute=recomputes, **options) as session:
            for _ in range(2):
                self.step(LARGEST)
                session.step()
        recording = session.recording
        assert recording is not None
        if recomputes:
            return recompute_all(recording, offload_rest=kind == "recomputes and offloads")
        return make_plan(recording, "everything", offload_everything(recording))

    def session(self, **options: Any) -> Session:
        return vdnn.offload(**{"plan": self.plan, "device": self.machine, "min_bytes": 0, **options})

    def step(self, sizes: Sizes, backward: Callable[[torch.Tensor], None] = torch.Tensor.backward) -> list[Any]:
        torch.manual_seed(sizes[0] + 100 * sizes[1])
        self.model.zero_grad()
        loss = self.model(torch.randint(32, sizes))
        backward(loss)
        return [loss.detach(), *(one.grad for one in self.model.parameters())]


@pytest.fixture(params=["offloads", "recomputes", "recomputes and offloads"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def machine() -> Iterator[VirtualMachine]:
    with VirtualMachine("titan-x", fake=False) as machine:
        yield machine


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(one, other, strict=True)
    )


def run(training: Training, sizes: list[Sizes], **options: Any) -> list[bool]:
    """Trains a step of each size, compares it with plain torch, and returns which steps the gate served as a whole."""
    served = []
    plain = [training.step(one) for one in sizes]
    with training.session(**options) as session:
        for size, expected in zip(sizes, plain, strict=True):
            assert same(expected, training.step(size)), f"the step of {size} differs from plain torch"
            session.step()
            served.append(settling_of(session).is_expected)
    return served


def test_the_third_length_of_a_text_is_served_by_the_gate(kind: str, machine: VirtualMachine) -> None:
    sizes = [(4, tokens) for tokens in (24, 20, 16, 11, 23, 7, 13, 5)]
    # Steps that follow a plan for the first time are measured.
    assert run(Training(machine, kind), sizes)[4:] == [True] * 4


def test_batches_of_new_sizes_and_lengths_are_served_once_both_have_varied(
    kind: str, machine: VirtualMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = mock.MagicMock()
    monkeypatch.setattr(ScriptSizes, "failed", failed)
    sizes = [(4, 24), (4, 21), (4, 20), (4, 15), (3, 15), (2, 15), (2, 11), (3, 17), (2, 7), (4, 23), (1, 8)]
    served = run(Training(machine, kind), sizes)
    assert not served[4], "no batch of another size was seen before"
    assert served[6:10] == [True] * 4
    assert not served[10], "a batch of one sequence has other views"
    assert failed.call_count == 1, "that was the only wrong guess"


def test_the_counts_of_steps_with_made_scripts_are_those_of_python(
    kind: str, machine: VirtualMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(machine, kind)
    counted = []
    for is_made in (True, False):
        if not is_made:
            monkeypatch.setattr(ScriptSizes, "script_for", lambda *_: None)
        with training.session(recheck=0) as session:
            for tokens in (24, 22, 20, 18, 16, 14, 12, 10):
                training.step((4, tokens))
                session.step()
            assert settling_of(session).is_expected is is_made
        counted.append(dataclasses.asdict(session.counters))
    by_trials = () if kind == "offloads" else OF_TRIALS
    assert all(counted[0][name] == counted[1][name] for name in counted[0] if name not in by_trials)


def test_what_is_too_small_to_be_managed_is_so_up_to_the_sizes_of_the_plan(machine: VirtualMachine) -> None:
    """Beyond them it may be large enough, and what is not in the script would stay and take room."""
    training = Training(machine, "offloads", min_bytes=400)  # statistics of norms are 4 bytes a token: 384 at most
    sizes = [(4, 14), (4, 18), (3, 18), (3, 20), (3, 22), (4, 22), (5, 19)]
    assert run(training, sizes, min_bytes=400)[4:] == [True, True, False]


def test_what_depends_on_the_length_otherwise_is_continued_by_python(kind: str, machine: VirtualMachine) -> None:
    """A window of at most 12 tokens: no product of sizes tells that."""
    training = Training(machine, kind, Network(between=lambda x: x[:, :12].sin().sum(1, keepdim=True) + x))
    sizes = [(4, tokens) for tokens in (24, 20, 16, 18, 14, 9, 8, 10, 7, 11, 6, 5)]
    served = run(training, sizes)
    assert served[3:5] == [True] * 2, "until then every window has 12 tokens"
    assert not served[5]


def test_another_structure_at_short_lengths_is_learned_beside_the_first_one(kind: str, machine: VirtualMachine) -> None:
    training = Training(machine, kind, Network(between=lambda x: x.sin() if x.shape[1] > 12 else x.cos().sigmoid()))
    sizes = [(4, tokens) for tokens in (24, 20, 16, 18, 10, 8, 9, 14, 6, 19)]
    run(training, sizes)


def test_a_step_that_differs_in_the_middle_is_continued_by_python(kind: str, machine: VirtualMachine) -> None:
    extra: list[int] = []

    def between(x: torch.Tensor) -> torch.Tensor:
        return x.exp().tanh() if extra and extra.pop() == 1 else x

    training = Training(machine, kind, Network(between))
    sizes = [(4, tokens) for tokens in (24, 20, 16, 11, 23, 7)]
    for position in range(1, 4):
        changed = [0] * (3 - position) + [1] + [0] * (position - 1)
        plain, ours = [], []
        for session, found in ((None, plain), (training.session(), ours)):
            for number, size in enumerate(sizes):
                extra[:] = changed if number == 5 else []
                if session is None:
                    found.append(training.step(size))
                    continue
                with session:
                    found.append(training.step(size))
                    session.step()
        assert all(map(same, plain, ours))


def _twice(loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def _by_gradients(loss: torch.Tensor) -> None:
    node: Any = loss.grad_fn
    leaves = []
    waiting, seen = [node], set()
    while waiting:
        one = waiting.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        if hasattr(one, "variable"):
            leaves.append(one.variable)
        waiting += [edge[0] for edge in one.next_functions]
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    (loss + sum(one.square().sum() for one in gradients)).backward()


def _raises(loss: torch.Tensor) -> None:
    handle = loss.register_hook(lambda _: (_ for _ in ()).throw(KeyError("in the backward")))
    with pytest.raises(KeyError):
        loss.backward(retain_graph=True)
    handle.remove()
    loss.backward()


@pytest.mark.parametrize("backward", [_twice, _by_gradients, _raises])
def test_other_backward_passes_of_a_made_step(
    kind: str, machine: VirtualMachine, backward: Callable[[torch.Tensor], None]
) -> None:
    training = Training(machine, kind)
    expected = training.step((4, 11), backward)
    with training.session() as session:
        for tokens in (24, 20, 16, 18):
            training.step((4, tokens))
            session.step()
        assert same(expected, training.step((4, 11), backward))


def test_no_more_scripts_are_made_after_three_that_did_not_hold(machine: VirtualMachine) -> None:
    """Each step of a new length takes another branch at its end."""
    taken: list[int] = []

    def between(x: torch.Tensor) -> torch.Tensor:
        for _ in range(taken.count(x.shape[1])):
            x = x.sin()
        return x

    training = Training(machine, "offloads", Network(between))
    made = []
    with training.session() as session:
        for tokens in (24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4):
            taken += [tokens] if tokens < 18 else []
            training.step((4, tokens))
            session.step()
            (sizes,) = next(iter(settling_of(session)._sizes.values())).values()
            made.append(sizes._failures)
    assert max(made) == 3


# The numbers of a made script.


@pytest.mark.parametrize(
    ("row", "product"),
    [
        ((7, 7), _Product(7, 1, ())),
        ((96, 60), _Product(4, 1, ((1, 0),))),
        ((2 * 24 * 24, 2 * 15 * 15), _Product(2, 1, ((1, 0), (1, 0)))),
        ((23, 14), _Product(1, 1, ((1, -1),))),
        ((12, 12 * 15 // 24), None),
    ],
)
def test_a_number_is_a_product_of_sizes(row: tuple[int, int], product: _Product | None) -> None:
    found = _product_of(row, [(4, 24), (4, 15)], [False, True])
    if product is None:
        assert found is None or found.at((4, 15)) == row[1]
    else:
        assert found == product


def test_a_product_that_is_not_whole_is_none() -> None:
    half = _product_of((12, 7), [(4, 24), (4, 14)], [False, True])
    assert half is not None
    assert [half.at((4, tokens)) for tokens in (24, 14, 10, 9)] == [12, 7, 5, None]


def _event(nbytes: int, storage_bytes: int) -> tuple[Any, ...]:
    return (0, False, False, False, False, -1, nbytes, storage_bytes, 0, 0, torch.Tensor, torch.float32, (), None)


def test_bad_input_of_a_resized_script() -> None:
    script = _C.Script([_event(0, 1), _event(2, 2)])
    script.resized((0, 1, 512), [None, None])
    with pytest.raises(IndexError, match="expected one of 2 numbers, got 2"):
        script.resized((0, 1), [None, None])
    with pytest.raises(ValueError, match="expected 2 events, got 1"):
        script.resized((0, 1, 512), [None])
    with pytest.raises(TypeError):
        script.resized((0, 1, "many"), [None, None])  # type: ignore[arg-type]
