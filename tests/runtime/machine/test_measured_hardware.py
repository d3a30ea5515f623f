"""The measured profile of a GPU, with stand-ins for the GPU and its clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vdnn import _C
from vdnn.hardware import HardwareProfile
from vdnn.runtime.machine import measured_hardware
from vdnn.runtime.machine.measured_hardware import measured_profile

# Nanoseconds of any work on the stand-in, by the precision of products at that time.
WORK_NS = {"ieee": 8_000_000, "tf32": 1_000_000}
LINK = SimpleNamespace(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_ways_bytes_per_s=2e9)


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], HardwareProfile]:
    """Measures a stand-in of a compute capability."""

    def seconds(device: torch.device, work: Callable[[], object]) -> float:
        work()
        return WORK_NS.get(torch.backends.cuda.matmul.fp32_precision, WORK_NS["ieee"]) / 1e9

    def on_cpu(make: Any) -> Any:
        return lambda *sizes, device=None, pin_memory=False, dtype=None: make(2, 2, dtype=dtype)

    def profile_of(major: int) -> HardwareProfile:
        properties = SimpleNamespace(name="stand-in", total_memory=1 << 34, major=major)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return measured_profile()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_C, "CudaDevice", lambda ordinal: _C.SimDevice())
    monkeypatch.setattr(measured_hardware, "measure_link", lambda native: LINK)
    monkeypatch.setattr(measured_hardware, "_seconds", seconds)
    for name in ("randn", "empty", "zeros"):
        monkeypatch.setattr(torch, name, on_cpu(getattr(torch, name)))
    return profile_of


@pytest.mark.parametrize("set_by_program", ["none", "ieee", "tf32"])
def test_float32_and_tf32_are_measured_whatever_the_program_has_set(
    measure: Callable[[int], HardwareProfile], set_by_program: str
) -> None:
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, set_by_program
    try:
        rates = measure(9).flop_per_s
        assert products.fp32_precision == set_by_program
    finally:
        products.fp32_precision = before
    assert rates["tf32"] == 8 * rates["float32"]


def test_a_card_before_ampere_has_no_tf32(measure: Callable[[int], HardwareProfile]) -> None:
    profile = measure(7)
    assert set(profile.flop_per_s) == {"float32", "float16", "bfloat16"}
    assert "flop_per_s.tf32" in measure(8).sources
