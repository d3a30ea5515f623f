"""Codecs: the encoded bytes are as few as stated, and the decoded values are within the stated bound."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import vdnn
from tests.runtime.rigs.side_by_side import assert_nothing_alive, same_bits
from tests.runtime.rigs.virtual_training import MODELS, recompute_all, train, trained_virtually
from vdnn import _C
from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.policies import PlanPolicy, PlanRequest
from vdnn.planning.simulate import simulate
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.recompute.codecs import CODECS, BFloat16, Bits, Codec, Float8
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.counters import Counters
from vdnn.runtime.storage.packed_view import PackedView
from vdnn.runtime.storage.transport import Transport, TransportOptions
from vdnn.step.plan import Action, Plan

# encoded bytes per byte; fp8 needs one byte for each value of four bytes, and four bytes for every 128 values
KEPT = {"bits": 1 / 8, "bf16": 1 / 2, "fp8": 33 / 128}


@pytest.fixture
def transport() -> Any:
    made = Transport(torch.device("cpu"), _C.SimDevice(), TransportOptions(0, 1 << 20, 1 << 20, timed=False))
    yield made
    made.close()


def floats(dtype: torch.dtype, *size: int) -> torch.Tensor:
    return (torch.randn(*size) * torch.logspace(-6, 4, size[-1])).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", [BFloat16, Float8])
def test_a_lossy_codec_keeps_its_bound(transport: Transport, codec: type[Codec], dtype: torch.dtype) -> None:
    original = floats(dtype, 3, 5, 77)
    if not codec.takes(original):
        return
    packed = codec(original, transport, Counters())
    made = packed.recompute(PackedView.unpack)
    assert made.untyped_storage().nbytes() == original.untyped_storage().nbytes()
    assert packed.is_close(packed.flat(original), packed.flat(made.view(-1)))
    assert not torch.equal(packed.flat(original), packed.flat(made.view(-1))), "it is lossy"
    assert not packed.is_close(packed.flat(original), packed.flat(made.view(-1)) * 1.2), "the bound is one"


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=300), name=st.sampled_from(["bf16", "fp8"])
)
@example(values=[2.0**-149, 2.0**-134], name="bf16")  # less than any bfloat16
@example(values=[2.0**-149], name="fp8")
@example(values=[1.99 * 2.0**-137] * 3 + [2.0**-136], name="fp8")
def test_any_values_come_back_within_the_bound(values: list[float], name: str) -> None:
    transport = Transport(torch.device("cpu"), _C.SimDevice(), TransportOptions(0, 1 << 20, 1 << 20, timed=False))
    original = torch.tensor(values)
    packed = CODECS[name](original, transport, Counters())
    assert packed.is_close(original, packed.recompute(PackedView.unpack).view(-1))
    transport.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_masked_scores_come_back_masked_and_their_neighbours_as_without_a_mask(
    transport: Transport, name: str, dtype: torch.dtype
) -> None:
    if not CODECS[name].takes(torch.empty(0, dtype=dtype)):
        pytest.skip(f"{name} does not encode {dtype}")
    scores = (torch.randn(5, 100) * 8).to(dtype)
    mask = torch.rand(5, 100) < 0.4
    mask[2] = True  # nothing else in a block
    masked = scores.masked_fill(mask, -math.inf)
    packed = CODECS[name](masked, transport, Counters())
    made = packed.recompute(PackedView.unpack).view(5, 100)
    assert torch.equal(made == -math.inf, mask)
    assert packed.is_close(packed.flat(masked), made.reshape(-1))
    unmasked = CODECS[name](scores.masked_fill(mask, 0.0), transport, Counters()).recompute(PackedView.unpack)
    assert torch.equal(made[~mask], unmasked.view(5, 100)[~mask])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bf16", "fp8"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_behind_which_no_step_is_of_use_do_not_become_finite(
    transport: Transport, value: float, name: str, dtype: torch.dtype
) -> None:
    if not CODECS[name].takes(torch.empty(0, dtype=dtype)):
        pytest.skip(f"{name} does not encode {dtype}")
    original = torch.randn(3, 128).to(dtype)
    original[1, 5:9], original[1, 20], original[1, 77] = value, -math.inf, 0.0
    made = CODECS[name](original, transport, Counters()).recompute(PackedView.unpack).view(3, 128)
    if value == value and name == "bf16":
        assert (made[1, 5:9] == value).all()
    else:
        assert made[1, 5:9].isnan().all()
    assert made[[0, 2]].isfinite().all(), "other blocks are as they were"


@pytest.mark.parametrize("size", [(1,), (7,), (8,), (3, 129)])
def test_masks_come_back_as_they_were(transport: Transport, size: tuple[int, ...]) -> None:
    mask = torch.rand(size) < 0.3
    packed = Bits(mask, transport, Counters())
    assert torch.equal(packed.recompute(PackedView.unpack), mask.view(-1))
    assert packed.kept_bytes == -(-mask.numel() // 8)


@pytest.mark.parametrize(("byte", "admitted"), [(0, True), (1, True), (2, False), (128, False)])
def test_a_mask_with_another_byte_than_0_and_1_is_not_packed(byte: int, admitted: bool) -> None:
    assert Bits.admits(torch.tensor([0, byte, 1], dtype=torch.uint8).view(torch.bool)) is admitted


def test_strides_come_back(transport: Transport) -> None:
    original = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    packed = BFloat16(original, transport, Counters())
    made = packed.recompute(PackedView.unpack)
    again = torch.empty_strided(original.shape, original.stride()).copy_(original.bfloat16().float())
    assert torch.equal(packed.flat(again), made)


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("offload_rest", [False, True], ids=["stays", "leaves"])
@pytest.mark.parametrize("name", ["bf16", "fp8"])
@pytest.mark.parametrize("model", MODELS)
def test_a_plan_with_a_lossy_codec_runs_as_predicted(model: str, name: str, *, offload_rest: bool) -> None:
    """The prediction holds also if encoding sets the peak; only encoded bytes are offloaded."""
    recording = trained_virtually(model, lossy=name).recording
    assert recording is not None
    lossy = [one for one in recording.lifetimes if one.recompute is not None and one.recompute.operation == name]
    assert lossy
    plan = recompute_all(recording, offload_rest=offload_rest)
    count, left = len(recording.lifetimes), sum(one.action is Action.COMPRESS for one in plan.lifetimes)
    assert left == len(plan.lifetimes) - count > 0
    predicted = simulate(recording, plan, profile_costs(load_profile("titan-x")))
    session = trained_virtually(model, plan, lossy=name)
    executed = session.timeline
    assert executed is not None
    assert (executed.step_ns, executed.peak_bytes) == (predicted.step_ns, predicted.peak_bytes)
    assert executed.copies == predicted.copies
    assert [(mark.begin_ns, mark.end_ns) for mark in executed.marks] == [
        (mark.begin_ns, mark.end_ns) for mark in predicted.marks
    ]
    assert "differs from the plan" not in session.report()
    moved = [one for one in executed.copies if one.lifetime >= count]
    assert len(moved) == 2 * left * offload_rest, "each there and back"


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_lossy_codec_leaves_the_share_it_says(name: str) -> None:
    recording = trained_virtually("perceptron", lossy=name).recording
    assert recording is not None
    for one in recording.lifetimes:
        if one.recompute is not None and one.recompute.operation == name:
            assert one.recompute.kept_bytes == pytest.approx(KEPT[name] * one.nbytes, rel=0.01)


def test_what_a_codec_leaves_comes_back_as_it_left(schedule: Any) -> None:
    """Runs with real numbers and hashes, and copies that may run at any time. Gradients have the same bits whether the
    encoded bytes are kept or offloaded. Without the codec the plan is followed as far as possible."""

    def gradients(plan: Plan, **options: Any) -> tuple[Session, list[torch.Tensor | None]]:
        with VirtualMachine("titan-x", fake=False, schedule=schedule, seed=5) as machine:
            session, found = train(machine, "perceptron", plan, integrity=True, **options)
            assert_nothing_alive(session)
            session.close()
        return session, found

    recording = trained_virtually("perceptron", lossy="bf16").recording
    assert recording is not None
    leaves = recompute_all(recording, offload_rest=True)
    session, found = gradients(leaves, lossy="bf16")
    assert session.counters.recomputes
    assert "differs from the plan" not in session.report()
    keep = [
        replace(one, action=Action.KEEP, absences=()) if one.action is Action.OFFLOAD else one
        for one in leaves.lifetimes
    ]
    _, same = gradients(replace(leaves, lifetimes=tuple(keep)), lossy="bf16")
    assert all(same_bits(one, other) for one, other in zip(found, same, strict=True))
    without, exact = gradients(leaves)
    assert "it expects bf16 of TanhBackward0" in without.report()
    assert not all(same_bits(one, other) for one, other in zip(found, exact, strict=True)), "it was lossy"


def test_gradients_are_close_with_a_lossy_codec_and_equal_without() -> None:
    with VirtualMachine("titan-x", fake=False) as machine:
        recorded, plain = train(machine, "perceptron", lossy="bf16")
        recorded.close()
    assert recorded.recording is not None
    plan = recompute_all(recorded.recording, offload_rest=False)
    with VirtualMachine("titan-x", fake=False) as machine:
        session, packed = train(machine, "perceptron", plan, lossy="bf16", integrity=True)
        session.close()
    assert session.counters.recomputes
    pairs = [(one, other) for one, other in zip(plain, packed, strict=True) if one is not None is not other]
    assert all(torch.allclose(one, other, rtol=0.05, atol=0.05 * float(one.abs().max())) for one, other in pairs)
    assert not all(torch.equal(one, other) for one, other in pairs), "something was packed"


class RecomputesEverything(PlanPolicy):
    name = "everything"
    source = "here"

    def plan(self, request: PlanRequest) -> Plan:
        return recompute_all(request.recording, offload_rest=False)


def test_integrity_mode_does_not_compare_what_is_made_of_what_a_lossy_codec_made() -> None:
    first, second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
    x = torch.randn(16, 32)
    options: dict[str, Any] = {"min_bytes": 0, "lossy": "bf16", "integrity": True}
    with VirtualMachine("titan-x", fake=False) as machine:
        with vdnn.offload(RecomputesEverything(), device=machine, **options) as session:
            for _ in range(3):
                second(first(x).sin()).square().sum().backward()
                session.step()
        assert session.recording is not None
        recomputes = [one.recompute for one in session.recording.lifetimes]
        (sine,) = (one for one in recomputes if one is not None and one.operation == "sin")
        (made_of,) = (recomputes[one] for one in sine.inputs)
        assert made_of is not None
        assert made_of.operation == "bf16"
        assert session.counters.recomputes
        assert "differs from the plan" not in session.report()


def test_nothing_lossy_is_used_by_itself() -> None:
    for name in MODELS:
        recording = trained_virtually(name).recording
        assert recording is not None
        operations = {one.recompute.operation for one in recording.lifetimes if one.recompute is not None}
        assert not operations & {"bf16", "fp8"}


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"lossy": "zip"}, ValueError, "lossy: expected 'bf16' or 'fp8', or None, got 'zip'"),
        ({"lossy": "bits"}, ValueError, "lossy: expected 'bf16' or 'fp8', or None, got 'bits'"),
        ({"lossy": ["bf16"]}, ValueError, r"lossy: expected 'bf16' or 'fp8', or None, got \['bf16'\]"),
        ({"lossy": "bf16", "policy": "vdnn-all"}, ValueError, "only a plan uses codecs"),
        ({"lossy": "bf16", "recompute": False}, ValueError, "with recompute=False a plan only offloads"),
    ],
)
def test_bad_input(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        vdnn.offload(**{"device": "sim", **options})
