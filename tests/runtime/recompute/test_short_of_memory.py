"""Recipes and codecs on a device that is short of memory, or that has no kernels: the step goes on without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import open_fake_device
from tests.fake_driver.control import FakeDriver
from tests.runtime.rigs.side_by_side import same_bits
from tests.runtime.rigs.virtual_training import recompute_all, train, trained_virtually
from vdnn import _C
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.recompute.codecs import LOSSLESS, BFloat16, Bits, codec_for
from vdnn.runtime.storage.transport import Transport, TransportOptions
from vdnn.step.recording import Recording

OPTIONS = TransportOptions(1 << 20, 1 << 20, 1 << 20)


class ShortOfMemory:
    """Stands in for a function, and has no memory for its first calls."""

    def __init__(self, run: Any, refusals: int = 1 << 30) -> None:
        self._run = run
        self.refusals = refusals
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls <= self.refusals:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self._run(*args, **kwargs)


def recipes_of(recording: Recording | None) -> list[str]:
    assert recording is not None
    return [one.recompute.operation for one in recording.lifetimes if one.recompute is not None]


@pytest.mark.parametrize("has_code", [False, True], ids=["without nvcc", "with nvcc"])
def test_masks_stay_bytes_on_a_gpu_without_device_code(
    fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, *, has_code: bool
) -> None:
    monkeypatch.setattr(_C, "device_code_present", lambda: has_code)
    mask = torch.rand(64) < 0.5
    cuda = Transport(torch.device("cpu"), open_fake_device(fake_driver), OPTIONS, owns_device=True)
    simulated = Transport(torch.device("cpu"), _C.SimDevice(), OPTIONS, owns_device=True)
    try:
        assert codec_for(mask, LOSSLESS, cuda) is (Bits if has_code else None)
        assert codec_for(mask.float(), ("bits", "bf16"), cuda) is BFloat16, "it runs torch's own kernels"
        assert codec_for(mask, LOSSLESS, simulated) is Bits, "it needs no device code"
    finally:
        cuda.close()
        simulated.close()


def test_a_save_that_there_is_no_memory_to_encode_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    with VirtualMachine("titan-x", fake=False) as machine:
        session, plain = train(machine, "perceptron")
        session.close()
    encode = ShortOfMemory(BFloat16._encoded)
    monkeypatch.setattr(BFloat16, "_encoded", lambda *args: encode(*args))
    with VirtualMachine("titan-x", fake=False) as machine:
        session, found = train(machine, "perceptron", lossy="bf16")
        session.close()
    assert encode.calls
    assert "bf16" not in recipes_of(session.recording)
    assert all(same_bits(one, other) for one, other in zip(plain, found, strict=True))


def test_encoding_is_tried_again_in_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = ShortOfMemory(BFloat16._encoded, refusals=1)
    monkeypatch.setattr(BFloat16, "_encoded", lambda *args: encode(*args))
    with VirtualMachine("titan-x", fake=False) as machine:
        session, _ = train(machine, "perceptron", lossy="bf16")
        session.close()
    wanted = recipes_of(trained_virtually("perceptron", lossy="bf16").recording)
    assert "bf16" in wanted
    assert sorted(recipes_of(session.recording)) == sorted(wanted)


def test_a_save_that_a_plan_encodes_is_offloaded_where_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = trained_virtually("perceptron", lossy="bf16").recording
    assert recording is not None
    plan = recompute_all(recording, offload_rest=False)
    with VirtualMachine("titan-x", fake=False) as machine:
        session, plain = train(machine, "perceptron")
        session.close()
    encode = ShortOfMemory(BFloat16._encoded)
    monkeypatch.setattr(BFloat16, "_encoded", lambda *args: encode(*args))
    with VirtualMachine("titan-x", fake=False) as machine:
        session, found = train(machine, "perceptron", plan, lossy="bf16", integrity=True)
        assert session.counters.storages
        assert "that the plan recomputes cannot be recomputed here" in session.report()
        session.close()
    assert encode.calls
    assert all(same_bits(one, other) for one, other in zip(plain, found, strict=True))


def test_a_recipe_whose_trial_had_no_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    convolve = ShortOfMemory(torch.convolution, refusals=1)
    monkeypatch.setattr(torch, "convolution", convolve)
    with VirtualMachine("titan-x", fake=False) as machine:
        session, _ = train(machine, "chain")
        session.close()
    short = recipes_of(session.recording)
    convolve.refusals = 0
    with VirtualMachine("titan-x", fake=False) as machine:
        session, _ = train(machine, "chain")
        session.close()
    assert convolve.calls
    assert short == recipes_of(session.recording)
