"""Operations that repeat in a rehearsal run from a memo, with the results that they have without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from vdnn.hardware import HostFigures
from vdnn.runtime.machine.allocation_tracker import AllocationTracker
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal import operation_memo
from vdnn.runtime.rehearsal.operation_memo import OperationMemo
from vdnn.runtime.rehearsal.rehearsal import Rehearsal, rehearse, subject_of
from vdnn.runtime.rehearsal.stage import stage
from vdnn.runtime.torch_internals import dispatch_entry

Run = Callable[..., Any]
_run: Run = OperationMemo.run
HOST = HostFigures(operation_ns=5, launch_ns=7, save_ns=0, copy_ns=0, recompute_ns=0)
WIDTH, TOKENS = 64, 12


class Recurrence(nn.Module):
    """A loop over time, as state-space models have, with values that are written in place and views of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decay = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype)
        rows, gates = self.into(x).chunk(2, dim=-1)
        made = torch.zeros_like(x)
        for token in range(x.shape[1]):
            state = state * torch.exp(-functional.softplus(self.decay)) + rows[:, token] * torch.sigmoid(
                gates[:, token]
            )
            state = torch.where(state > 10.0, state.clamp(max=10.0), state)
            made[:, token] = state.to(x.dtype)
            if made[:, token].isnan().any():
                raise AssertionError("nothing is NaN")
        return self.out(functional.gelu(made.transpose(0, 1).contiguous().masked_fill_(made.transpose(0, 1) < 0, 0.0)))


class Maxima(nn.Module):
    """A loop as in RWKV: the derivative of a maximum compares numbers, and the first steps add to known zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys, made = self.into(x), torch.zeros_like(x)
        largest, total = torch.zeros(x.shape[0], WIDTH), torch.zeros(x.shape[0], WIDTH)
        for token in range(x.shape[1]):
            key = keys[:, token]
            maximum = torch.maximum(largest, key)
            total = torch.exp(largest - maximum) * total + torch.exp(key - maximum)
            made[:, token] = total
            largest = maximum
        return made


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, dropout=0.1) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


PROGRAMS: dict[str, Callable[[int], Any]] = {
    "a loop over time": lambda batch: (Recurrence(), torch.randn(batch, TOKENS, WIDTH)),
    "a loop in bfloat16": lambda batch: (
        Recurrence().bfloat16(),
        torch.randn(batch, TOKENS, WIDTH, dtype=torch.bfloat16),
    ),
    "maxima in a loop": lambda batch: (Maxima(), torch.randn(batch, TOKENS, WIDTH)),
    "attention in mixed precision, checkpointed": lambda batch: (Attention(), torch.randn(batch, TOKENS, WIDTH)),
    "convolutions": lambda batch: (convolutions(), torch.randn(batch, 8, 32, 32)),
    "LSTM cells": lambda batch: (Cells(), torch.randn(batch, TOKENS, WIDTH)),
}


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = None
        for token in range(x.shape[1]):
            hidden = self.cell(x[:, token], hidden)
        return hidden[0]  # type: ignore[index, no-any-return]


def rehearsed(name: str, optimizer: str | None = None) -> Rehearsal:
    torch.manual_seed(0)
    return rehearse(subject_of(PROGRAMS[name], 4), "h100", optimizer=optimizer, min_bytes=0)


@pytest.mark.parametrize("optimizer", [None, "adamw"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rehearsal_is_the_same_with_and_without_a_memo(
    name: str, optimizer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rehearsed(name, optimizer)
    monkeypatch.setattr(OperationMemo, "_operation", lambda memo, func: None)
    monkeypatch.setattr(OperationMemo, "detached", lambda memo, tensor: None)
    assert found == rehearsed(name, optimizer)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_memo_has_is_what_torch_finds_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def again(memo: OperationMemo, noted: Any, made: Any, func: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        out = memo_run[0](func, args, kwargs)
        assert memo._note(func, args, kwargs, tensors, out) == noted, func
        compared.append(str(func))
        return out

    def run(memo: OperationMemo, func: Any, args: Any, kwargs: Any, rehearse: Run) -> Any:
        memo_run[:] = [rehearse]
        return _run(memo, func, args, kwargs, rehearse)

    memo_run: list[Run] = []
    monkeypatch.setattr(OperationMemo, "detached", lambda memo, tensor: None)  # as any other operation
    monkeypatch.setattr(OperationMemo, "_again", again)
    monkeypatch.setattr(OperationMemo, "run", run)
    rehearsed(name, "adamw")
    assert len(compared) > 100


@pytest.mark.parametrize("kind", [Recurrence, Maxima])
def test_a_loop_runs_from_the_memo(kind: type[nn.Module]) -> None:
    """All but a few operations of each kind."""
    with VirtualMachine("h100") as machine, stage(machine) as values:
        assert values.memo is not None
        model, x = kind(), torch.randn(4, TOKENS, WIDTH)
        model(x).sum().backward()
        hits, before = values.memo.hits, machine.operations
        model(x).sum().backward()
        assert values.memo.hits - hits > 0.8 * (machine.operations - before)


def test_values_are_followed_as_without_a_memo() -> None:
    with VirtualMachine("h100") as machine, stage(machine) as values:
        known, data = torch.ones(8, dtype=torch.int64), torch.randn(8) @ torch.randn(8, 8)
        for _ in range(3):
            assert (known + known).tolist() == [2] * 8
            assert (known * 3).sum().item() == 24
            both = data * 2
            both.copy_(known)
            assert both.tolist() == [1.0] * 8
            both.fill_(4)
            assert both.sum().item() == 32
        assert values.stand_ins.given == ()
        (data * 2).sum().item()
        assert len(values.stand_ins.given) == 1


def test_what_is_expected_of_results_is_expected_each_time() -> None:
    with VirtualMachine("h100") as machine, stage(machine) as values:
        assert values.memo is not None
        data, zeros = torch.randn(8) @ torch.randn(8, 8), torch.zeros(8)
        for _ in range(3):
            assert not (data == data * 2).any()
            assert (data == data).all()  # the test for NaN
            assert (data * 3).topk(2).indices.max().item() < 8
            assert not (data + zeros).isnan().any()
            mask = torch.isfinite(data)
            assert mask.all()
        hits = values.memo.hits
        data == data * 2  # noqa: B015
        data + zeros
        assert values.memo.hits == hits + 3


def test_a_detached_tensor_is_what_torch_makes_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with VirtualMachine("h100", host=HOST) as machine, stage(machine) as values:
        assert values.memo is not None
        base = nn.Linear(6, 6)(torch.randn(4, 6))[1:, ::2]
        hits, issued_ns, allocated = values.memo.hits, machine.issued_ns, machine.allocated_bytes
        detached = base.detach()
        assert values.memo.hits == hits + 1
        taken_ns = machine.issued_ns - issued_ns
        monkeypatch.setattr(OperationMemo, "detached", lambda memo, tensor: None)
        monkeypatch.setattr(OperationMemo, "_operation", lambda memo, func: None)
        values.memo._of.clear()
        issued_ns = machine.issued_ns
        anew = base.detach()
        assert machine.issued_ns - issued_ns == taken_ns > 0
        assert machine.allocated_bytes == allocated
        for name in ("shape", "dtype", "device", "requires_grad", "_version", "is_leaf", "fake_device", "fake_mode"):
            assert getattr(detached, name) == getattr(anew, name), name
        assert (detached.stride(), detached.storage_offset()) == (anew.stride(), anew.storage_offset())
        assert detached.untyped_storage()._cdata == base.untyped_storage()._cdata
        assert torch._C._dispatch_keys(detached) == torch._C._dispatch_keys(anew)
        detached.mul_(2.0)
        assert base._version == anew._version == detached._version == 1


def test_views_share_the_memory_of_what_they_view() -> None:
    with VirtualMachine("h100") as machine, stage(machine):
        for _ in range(3):
            base = torch.randn(4, 6) @ torch.randn(6, 6)
            allocated = machine.allocated_bytes
            part = base.transpose(0, 1)[1:3]
            assert part.untyped_storage()._cdata == base.untyped_storage()._cdata
            assert (part.storage_offset(), part.stride(), part.shape) == (1, (1, 6), (2, 4))
            assert machine.allocated_bytes == allocated
            version = base._version
            part.mul_(2.0)
            assert base._version == version + 1
            del part, base


def test_equal_numbers_of_other_types_are_other_operations() -> None:
    with VirtualMachine("h100") as machine, stage(machine):
        whole = torch.randn(4).sign().long()
        assert [(whole * factor).dtype for factor in (2, 2.0, True, 2)] == [
            torch.int64,
            torch.float32,
            torch.int64,
            torch.int64,
        ]
        torch.set_default_dtype(torch.float64)
        try:
            assert (whole * 2.0).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_the_precision_of_products_counts_when_they_run() -> None:
    with VirtualMachine("h100") as machine, stage(machine):
        left = torch.randn(2048, 2048).exp()
        taken = []
        for precision in ("ieee", "ieee", "tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            try:
                before = machine.now_ns
                left @ left
                taken.append(machine.now_ns - before)
            finally:
                torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert taken[0] == taken[1] == taken[3] > taken[2]


def test_a_memo_of_too_many_geometries_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_memo, "_MOST", 8)
    with VirtualMachine("h100") as machine, stage(machine) as values:
        for length in range(1, 40):
            assert ((torch.randn(length) @ torch.randn(length, length)) * 2).shape == (length,)
        assert values.memo is not None
        assert sum(len(one.noted) for one in values.memo._of.values() if one) <= 8


@pytest.mark.parametrize("is_compiling", [False, True])
def test_torch_turns_its_compiler_off_where_it_is_on(is_compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    turned_off: list[bool] = []

    def disable(handler: Run, recursive: bool) -> Run:
        def off(*arguments: Any) -> Any:
            turned_off.append(recursive)
            return handler(*arguments)

        return off

    monkeypatch.setattr(torch, "_disable_dynamo", disable)
    monkeypatch.setattr(dispatch_entry, "_callback", lambda: (lambda frame: None) if is_compiling else None)
    enter = dispatch_entry.turns_dynamo_off(lambda mode, func, types, args, kwargs: func)
    assert enter(None, "operation", ()) == "operation"
    assert turned_off == [True] * is_compiling


@pytest.mark.slow
def test_the_compiler_does_not_see_the_entry_of_a_mode() -> None:
    """It would warn of what it cannot trace there, and warnings are errors here."""
    compiled = torch.compile(lambda x: (x.sin() + 1).cos(), backend="eager")
    with AllocationTracker():
        assert compiled(torch.zeros(3)).tolist() == [torch.ones(()).cos().item()] * 3


def test_a_result_that_an_argument_grows_to_hold_grows_each_time() -> None:
    machine = VirtualMachine("h100")
    with machine, stage(machine):
        x = torch.ones(10, 10)
        for _ in range(3):
            out = torch.empty(0)
            torch.add(x, x, out=out)
            assert out.shape == (10, 10)
            assert out.untyped_storage().nbytes() == 400
