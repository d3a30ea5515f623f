"""The doctor on injected facts: what it reads, what it reports, and that no fact makes it fail."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import Any

import pytest

from vdnn.doctor import Sources, examine, render_json, render_text
from vdnn.doctor.facts import Report
from vdnn.hardware import HostFigures, LinkFigures, load_profile
from vdnn.hardware.measured_host import MeasuredHost

GIB = 2**30
LINK = LinkFigures(
    block_bytes=64 * 2**20,
    repeats=7,
    to_host_bytes_per_s=25_300_000_000,
    to_device_bytes_per_s=24_100_000_000,
    both_ways_bytes_per_s=41_000_000_000,
    pinning_ns=21_500_000,
)


HOST = MeasuredHost(
    machine="this one",
    operation_ns=3100,
    launch_ns=2900,
    save_ns=5800,
    move_out_ns=14_000,
    fetch_ns=12_000,
    recompute_ns=40_000,
    event_ns=300,
)


class Kernel(Enum):
    PACK_BITS = 0
    CONTENT_HASH = 1


@dataclasses.dataclass
class Info:
    name: str = "NVIDIA H200"
    total_bytes: int = 140 * GIB
    compute_capability: int = 90
    pci_bus_id: str = "0000:1A:00.0"
    numa_node: int = 1
    integrated: bool = False


@dataclasses.dataclass
class Limits:
    total_bytes: int = 256 * GIB
    available_bytes: int = 200 * GIB
    cgroup_limit_bytes: int | None = 128 * GIB
    cgroup_used_bytes: int | None = 3 * GIB
    memlock_limit_bytes: int | None = None
    numa_nodes: int = 2
    huge_page_bytes: int = 2 * 2**20
    huge_pages_free: int = 0
    transparent_huge_pages: str = "madvise"


class Gpu:
    def __init__(self, core: Core) -> None:
        self._core = core

    @property
    def info(self) -> Info:
        return self._core.info

    def close(self) -> None:
        self._core.open_gpus -= 1
        if self._core.broken == "close":
            raise RuntimeError("close does not work")


class Core:
    """A native core that works; `broken` names the one call that raises."""

    __file__ = "/site/vdnn/_C.so"
    Kernel = Kernel

    def __init__(self, *, gpus: int = 1, loaded: bool = True, device_code: bool = True, broken: str = "") -> None:
        self.gpus = gpus
        self.loaded = loaded
        self.device_code = device_code
        self.broken = broken
        self.info = Info()
        self.limits = Limits()
        self.open_gpus = 0

    def check(self, call: str) -> None:
        if self.broken == call:
            raise RuntimeError(f"{call} does not work\nat all")

    def driver_status(self, library: str) -> dict[str, str | int | bool]:
        self.check("driver_status")
        reason = "" if self.loaded else "it could not be opened"
        count, version = (self.gpus, 13000) if self.loaded else (0, 0)
        return {
            "library": library,
            "loaded": self.loaded,
            "reason": reason,
            "version": version,
            "device_count": count,
        }

    def CudaDevice(self, ordinal: int, library: str) -> Gpu:  # noqa: N802 (a class in the native core)
        self.check("CudaDevice")
        assert ordinal < self.gpus
        self.open_gpus += 1
        return Gpu(self)

    def host_limits(self) -> Limits:
        self.check("host_limits")
        return self.limits

    def device_code_missing_reason(self) -> str:
        self.check("device_code_missing_reason")
        return "" if self.device_code else "built without nvcc"


def report_on(core: Core | None = None, *, torch: str = "2.13.0", link: Any = None, host: Any = None) -> Report:
    def native() -> Any:
        if core is None:
            raise ImportError("No module named 'vdnn._C'")
        return core

    def measured(_: Any) -> LinkFigures:
        return LINK

    return examine(
        Sources(native_core=native, torch_version=lambda: torch, link=link or measured, host=host or (lambda: HOST))
    )


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_a_machine_with_everything_has_nothing_to_explain() -> None:
    report = report_on(Core())
    assert report.meanings == ()
    assert render_text(report).endswith("\nNothing is missing.\n")


def test_every_fact_is_in_the_json() -> None:
    found = json.loads(render_json(report_on(Core())))
    assert found["format"] == 1
    assert found["extension"] == {"present": True, "path": "/site/vdnn/_C.so", "problem": None}
    assert found["driver"]["version"] == "13.0"
    assert found["gpus"][0]["compute_capability"] == "9.0"
    assert found["gpus"][0]["numa_node"] == 1
    assert found["gpus"][0]["link"] == dataclasses.asdict(LINK)
    assert [codec["kernel"] for codec in found["codecs"]] == ["content_hash", "pack_bits"]
    assert found["host"]["cgroup_limit_bytes"] == 128 * GIB
    assert found["host"]["memlock_limit_bytes"] is None
    assert found["torch"] == {"version": "2.13.0", "needed": "torch>=2.10", "usable": True, "problem": None}


def test_the_text_shows_the_link_each_way_and_both_at_once() -> None:
    text = unwrapped(render_text(report_on(Core())))
    assert "to host 25.30 GB/s" in text
    assert "to device 24.10 GB/s" in text
    assert "both ways 41.00 GB/s together" in text
    assert "pinning 64.00 MiB takes 21.50 ms" in text


def every_kind_of_machine() -> list[Core | None]:
    small = Core()
    small.limits = Limits(
        memlock_limit_bytes=65536, transparent_huge_pages="never", cgroup_limit_bytes=None, huge_page_bytes=0
    )
    shared = Core()
    shared.info = Info(integrated=True, numa_node=-1, pci_bus_id="", compute_capability=0, name="A " * 60)
    return [
        None,
        Core(),
        Core(gpus=0),
        Core(gpus=8),
        Core(loaded=False),
        Core(device_code=False),
        small,
        shared,
    ]


@pytest.mark.parametrize("core", every_kind_of_machine())
def test_the_text_fits_in_80_columns(core: Core | None) -> None:
    lines = render_text(report_on(core)).splitlines()[1:]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("core", "torch", "meaning"),
    [
        (None, "2.13.0", "Without the native core"),
        (Core(loaded=False), "2.13.0", "Without the CUDA driver nothing can be offloaded here"),
        (Core(gpus=0), "2.13.0", "The driver sees no GPU"),
        (
            Core(device_code=False),
            "2.13.0",
            "Without device code, masks and indices are offloaded at full size",
        ),
        (Core(), "2.7.0", "torch 2.7.0 is too old for the runtime, which needs torch>=2.10."),
        (Core(broken="CudaDevice"), "2.13.0", "GPU 0 could not be opened"),
        (Core(broken="host_limits"), "2.13.0", "set a cap on pinned memory yourself"),
        (every_kind_of_machine()[-2], "2.13.0", "The limit on locked memory is 64.00 KiB"),
        (every_kind_of_machine()[-2], "2.13.0", "There are no huge pages"),
        (every_kind_of_machine()[-1], "2.13.0", "GPU 0 shares the host's memory"),
        (every_kind_of_machine()[-1], "2.13.0", "does not say which one is nearest to the GPU"),
    ],
)
def test_each_missing_thing_is_explained(core: Core | None, torch: str, meaning: str) -> None:
    assert meaning in unwrapped(" ".join(report_on(core, torch=torch).meanings))


@pytest.mark.parametrize(
    "call",
    [
        "driver_status",
        "CudaDevice",
        "close",
        "host_limits",
        "device_code_missing_reason",
    ],
)
def test_one_broken_fact_says_why_and_hides_no_other(call: str) -> None:
    report = report_on(Core(broken=call))
    assert f"{call} does not work" in unwrapped(render_text(report))
    assert json.loads(render_json(report))["torch"]["version"] == "2.13.0"
    assert "host memory" in render_text(report) or call == "host_limits"


@pytest.mark.parametrize("name", ["driver_status", "CudaDevice", "host_limits", "device_code_missing_reason", "Kernel"])
def test_a_core_of_another_version_that_lacks_a_call_is_reported_on(name: str) -> None:
    class Older(Core):
        def __getattribute__(self, wanted: str) -> Any:
            if wanted == name:
                raise AttributeError(f"module 'vdnn._C' has no attribute {wanted!r}")
            return super().__getattribute__(wanted)

    report = report_on(Older())
    assert report.extension.present
    assert f"no attribute '{name}'" in unwrapped(render_text(report)) or name == "Kernel"


def test_a_missing_core_is_the_reason_for_all_it_would_have_read() -> None:
    report = report_on(None)
    assert report.extension.problem == "No module named 'vdnn._C'"
    assert report.driver.problem == report.host.problem == "not read: the native core is missing"
    assert (report.gpus, report.codecs) == ((), ())


def test_a_link_that_cannot_be_measured_leaves_the_gpu_described() -> None:
    def refused(_: Any) -> LinkFigures:
        raise MemoryError("cannot pin 64.00 MiB")

    core = Core()
    (gpu,) = report_on(core, link=refused).gpus
    assert gpu.name == "NVIDIA H200"
    assert gpu.link is None
    assert gpu.problem == "its link was not measured: cannot pin 64.00 MiB"


def test_every_gpu_that_is_opened_is_closed() -> None:
    core = Core(gpus=3)
    assert len(report_on(core).gpus) == 3
    assert core.open_gpus == 0


def test_a_missing_torch_is_a_fact_with_a_reason() -> None:
    def missing() -> str:
        raise ImportError("no torch is installed")

    report = examine(Sources(native_core=lambda: Core(), torch_version=missing, link=lambda _: LINK))
    assert report.torch.version is None
    assert report.torch.problem == "no torch is installed"
    assert "Without torch no training step can be run; run pip install 'torch>=2.10'." in report.meanings


def test_the_text_has_the_issue_times_of_the_host_beside_those_of_the_profile() -> None:
    figures = HostFigures.of(load_profile("h200"))
    assert figures is not None
    shown = unwrapped(render_text(report_on(Core())))
    assert f"an operation 3.10 us (h200: {figures.operation_ns / 1e3:.2f} us)" in shown
    assert f"a launch 2.90 us (h200: {figures.launch_ns / 1e3:.2f} us)" in shown
    assert f"a save 5.80 us (h200: {figures.save_ns / 1e3:.2f} us)" in shown
    assert f"a move out 14.00 us (h200: {figures.copy_ns / 1e3:.2f} us)" in shown
    assert f"a fetch 12.00 us (h200: {figures.copy_ns / 1e3:.2f} us)" in shown
    assert f"a recompute 40.00 us (h200: {figures.recompute_ns / 1e3:.2f} us)" in shown
    assert "an event 0.30 us" in shown


def test_without_a_gpu_the_text_says_that_launches_are_not_measured() -> None:
    alone = dataclasses.replace(HOST, launch_ns=None)
    shown = unwrapped(render_text(report_on(Core(gpus=0), host=lambda: alone)))
    assert "a launch not measured: no GPU (h100: " in shown


def test_a_host_that_cannot_be_measured_is_a_fact_with_a_reason() -> None:
    def broken() -> MeasuredHost:
        raise RuntimeError("no clock\nat all")

    report = report_on(Core(), host=broken)
    assert report.issue.problem == "not measured: no clock at all"
    assert "issuing not measured: no clock at all" in unwrapped(render_text(report))
    assert report.gpus[0].link == LINK


def test_the_host_is_not_measured_with_a_torch_that_the_runtime_refuses() -> None:
    report = report_on(Core(), torch="1.0", host=lambda: pytest.fail("it was measured"))
    assert report.issue.measured is None
