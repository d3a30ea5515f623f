"""One list names every driver entry point: the loader resolves exactly these, and the fake driver defines them all."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE_DRIVER = ROOT / "build" / "testing" / "libvdnn_fake_driver.so"
# The versioned symbols behind the driver header's macros. Without the suffix, each is a different, older function.
VERSIONED = {
    "cuCtxPopCurrent": 2,
    "cuCtxPushCurrent": 2,
    "cuDevicePrimaryCtxRelease": 2,
    "cuDeviceTotalMem": 2,
    "cuEventDestroy": 2,
    "cuMemAlloc": 2,
    "cuMemFree": 2,
    "cuMemHostRegister": 2,
    "cuMemcpyDtoHAsync": 2,
    "cuMemcpyHtoDAsync": 2,
    "cuStreamDestroy": 2,
}


def declared() -> list[str]:
    return re.findall(r"^  X\((cu\w+),", (ROOT / "csrc" / "device" / "cuda" / "driver_api.h").read_text(), re.MULTILINE)


def missing_from(library: ctypes.CDLL, symbols: list[str]) -> list[str]:
    return [symbol for symbol in symbols if not hasattr(library, symbol)]


def unversioned(symbols: list[str]) -> list[str]:
    return [symbol for symbol in symbols if symbol in VERSIONED]


def test_no_entry_point_is_listed_twice() -> None:
    assert len(declared()) == len(set(declared())) >= 30


def test_versioned_entry_points_are_listed_by_their_versioned_symbol() -> None:
    assert unversioned(declared()) == []
    assert unversioned(["cuInit", "cuMemAlloc"]) == ["cuMemAlloc"]


@pytest.fixture
def fake_library() -> ctypes.CDLL:
    assert FAKE_DRIVER.is_file(), f"{FAKE_DRIVER} is missing: run `make build`"
    return ctypes.CDLL(str(FAKE_DRIVER))


def test_the_fake_driver_defines_every_entry_point(fake_library: ctypes.CDLL) -> None:
    assert missing_from(fake_library, declared()) == []
    assert missing_from(fake_library, ["cuInit", "cuTimeTravel"]) == ["cuTimeTravel"]


def test_no_source_calls_the_driver_past_the_list() -> None:
    called = {
        symbol
        for path in sorted((ROOT / "csrc").rglob("*.cpp"))
        for symbol in re.findall(r"\b(cu[A-Z]\w+)\b", path.read_text())
    }
    assert called <= set(declared())
