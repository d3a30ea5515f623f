"""Reads every fact once and makes the Report. Never raises: for a fact that cannot be read, it says why.

`except Exception` is intended here, and only here: the doctor runs on machines that are broken in unknown ways, and one
subject that cannot be read must not hide the others.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from vdnn.bytesize import format_bytes
from vdnn.doctor.facts import (
    CodecFacts,
    DriverFacts,
    ExtensionFacts,
    GpuFacts,
    HostFacts,
    IssueFacts,
    Report,
    TorchFacts,
)
from vdnn.doctor.sources import Sources
from vdnn.hardware import HostFigures, load_profile, profile_names
from vdnn.requirements import NEEDED, in_range
from vdnn.version import __version__

if TYPE_CHECKING:
    from vdnn._C import Device, HostLimits

_T = TypeVar("_T")


def examine(sources: Sources | None = None) -> Report:
    """Reads what this machine has for vdnn. Blocks for a few seconds to measure the host, and
    a second or two for each GPU's link."""
    sources = sources if sources is not None else Sources()
    native: ModuleType | None = None
    try:
        native = sources.native_core()
        extension = ExtensionFacts(present=True, path=native.__file__, problem=None)
    except Exception as error:
        extension = ExtensionFacts(present=False, path=None, problem=_sentence(error))
    driver = _read(lambda: _driver(_needed(native), sources.library), _unread_driver(sources.library))
    gpus = tuple(
        _read(partial(_gpu, native, sources, ordinal), _unread_gpu(ordinal)) for ordinal in range(driver.device_count)
    )
    codecs = () if native is None else _codecs(native)
    host = _read(lambda: _host(_needed(native)), _unread_host)
    torch = _read(lambda: _torch(sources), _unread_torch)
    issue = _issue(sources, gpus, torch)
    return Report(
        vdnn_version=__version__,
        python_version=platform.python_version(),
        platform=platform.platform(),
        extension=extension,
        driver=driver,
        gpus=gpus,
        codecs=codecs,
        host=host,
        torch=torch,
        issue=issue,
        meanings=meanings_of(extension, driver, gpus, codecs, host, torch),
    )


def _read(read: Callable[[], _T], unread: Callable[[str], _T]) -> _T:
    """The facts that `read` returns. If it raises, the facts that `unread` makes of the error's message."""
    try:
        return read()
    except Exception as error:
        return unread(_sentence(error))


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _needed(native: ModuleType | None) -> ModuleType:
    if native is None:
        raise LookupError("not read: the native core is missing")
    return native


def _driver(native: ModuleType, library: str) -> DriverFacts:
    status = native.driver_status(library)
    version = int(status["version"])
    return DriverFacts(
        library=str(status["library"]),
        loaded=bool(status["loaded"]),
        version=f"{version // 1000}.{version % 1000 // 10}" if version else None,
        device_count=int(status["device_count"]),
        problem=str(status["reason"]) or None,
    )


def _unread_driver(library: str) -> Callable[[str], DriverFacts]:
    return lambda why: DriverFacts(library=library, loaded=False, version=None, device_count=0, problem=why)


def _gpu(native: ModuleType | None, sources: Sources, ordinal: int) -> GpuFacts:
    device: Device = _needed(native).CudaDevice(ordinal, sources.library)
    try:
        facts = _described(device, ordinal)
        try:
            return replace(facts, link=sources.link(device))
        except Exception as error:
            return replace(facts, problem=f"its link was not measured: {_sentence(error)}")
    finally:
        device.close()


def _described(device: Device, ordinal: int) -> GpuFacts:
    info = device.info
    capability = info.compute_capability
    return GpuFacts(
        ordinal=ordinal,
        name=info.name,
        total_bytes=info.total_bytes,
        compute_capability=f"{capability // 10}.{capability % 10}" if capability else None,
        pci_bus_id=info.pci_bus_id or None,
        numa_node=info.numa_node if info.numa_node >= 0 else None,
        integrated=info.integrated,
        link=None,
        problem=None,
    )


def _unread_gpu(ordinal: int) -> Callable[[str], GpuFacts]:
    return lambda why: GpuFacts(ordinal, None, None, None, None, None, None, None, why)


def _codecs(native: ModuleType) -> tuple[CodecFacts, ...]:
    names = _read(lambda: sorted(native.Kernel.__members__), lambda _: ["ALL"])
    # Empty if the build has device code.
    reason = _read(lambda: native.device_code_missing_reason(), lambda why: why)
    return tuple(CodecFacts(name.lower(), available=not reason, reason=reason or None) for name in names)


def _host(native: ModuleType) -> HostFacts:
    limits: HostLimits = native.host_limits()
    return HostFacts(
        total_bytes=limits.total_bytes,
        available_bytes=limits.available_bytes,
        cgroup_limit_bytes=limits.cgroup_limit_bytes,
        cgroup_used_bytes=limits.cgroup_used_bytes,
        memlock_limit_bytes=limits.memlock_limit_bytes,
        numa_nodes=limits.numa_nodes,
        huge_page_bytes=limits.huge_page_bytes,
        huge_pages_free=limits.huge_pages_free,
        transparent_huge_pages=limits.transparent_huge_pages,
        problem=None,
    )


def _unread_host(why: str) -> HostFacts:
    return HostFacts(None, None, None, None, None, None, None, None, None, why)


def _torch(sources: Sources) -> TorchFacts:
    version = sources.torch_version()
    return TorchFacts(version=version, needed=NEEDED, usable=in_range(version), problem=None)


def _unread_torch(why: str) -> TorchFacts:
    return TorchFacts(version=None, needed=NEEDED, usable=False, problem=why)


def _issue(sources: Sources, gpus: tuple[GpuFacts, ...], torch: TorchFacts) -> IssueFacts:
    """Measures this machine's host, and shows it beside that of the profile that is nearest to its GPU."""
    profile = _nearest_profile(gpus)
    of_profile = _read(lambda: HostFigures.of(load_profile(profile)), lambda _: None)
    if not torch.usable:
        return IssueFacts(None, profile, of_profile, "not measured: there is no torch that the runtime accepts")
    try:
        return IssueFacts(sources.host(), profile, of_profile, None)
    except Exception as error:
        return IssueFacts(None, profile, of_profile, f"not measured: {_sentence(error)}")


def _nearest_profile(gpus: tuple[GpuFacts, ...]) -> str:
    """The profile with figures of a host that a GPU here is named like; otherwise the one that plans use by default."""
    names = " ".join(str(gpu.name) for gpu in gpus).lower().split()
    return next((name for name in profile_names() if name in names and load_profile(name).issue_ns), "h100")


# One sentence for each missing thing: what it means for a user who wants to train.

# A smaller pool cannot hold enough activations for offloading to help.
_SMALL_MEMLOCK_BYTES = 2**30


def meanings_of(
    extension: ExtensionFacts,
    driver: DriverFacts,
    gpus: tuple[GpuFacts, ...],
    codecs: tuple[CodecFacts, ...],
    host: HostFacts,
    torch: TorchFacts,
) -> tuple[str, ...]:
    """The sentences, in the order in which a user would fix the problems."""
    return (
        *_of_extension(extension),
        *_of_torch(torch),
        *(_of_driver(driver) if extension.present else ()),
        *(sentence for gpu in gpus for sentence in _of_gpu(gpu)),
        *_of_codecs(codecs),
        *(_of_host(host, gpus) if extension.present else ()),
    )


def _of_extension(extension: ExtensionFacts) -> Iterator[str]:
    if not extension.present:
        yield (
            "Without the native core (vdnn._C) only the command line and the planner work; install vdnn "
            "from a wheel, or build it with `make build` in a checkout."
        )


def _of_torch(torch: TorchFacts) -> Iterator[str]:
    if torch.version is None:
        yield f"Without torch no training step can be run; run pip install '{torch.needed}'."
    elif not torch.usable:
        yield f"torch {torch.version} is too old for the runtime, which needs {torch.needed}."


def _of_driver(driver: DriverFacts) -> Iterator[str]:
    if not driver.loaded:
        yield (
            "Without the CUDA driver nothing can be offloaded here; the simulated device, the planner and "
            "the tests work."
        )
    elif driver.device_count == 0:
        yield (
            "The driver sees no GPU: nothing can be offloaded here. In a container, check that it has access to a "
            "GPU; otherwise check CUDA_VISIBLE_DEVICES."
        )


def _of_gpu(gpu: GpuFacts) -> Iterator[str]:
    if gpu.name is None:
        yield f"GPU {gpu.ordinal} could not be opened, so vdnn cannot use it."
        return
    if gpu.integrated:
        yield f"GPU {gpu.ordinal} shares the host's memory: offloading from it does not free memory."
    if gpu.link is None:
        yield f"The link of GPU {gpu.ordinal} was not measured, so plans for it use guessed rates."


def _of_codecs(codecs: tuple[CodecFacts, ...]) -> Iterator[str]:
    if any(not codec.available for codec in codecs):
        yield (
            "Without device code, masks and indices are offloaded at full size and integrity mode is "
            "unavailable; everything else works. Build vdnn with nvcc to get device code."
        )


def _of_host(host: HostFacts, gpus: tuple[GpuFacts, ...]) -> Iterator[str]:
    if host.problem is not None:
        yield "The host's memory limits are unknown, so set a cap on pinned memory yourself."
        return
    if host.memlock_limit_bytes is not None and host.memlock_limit_bytes < _SMALL_MEMLOCK_BYTES:
        yield (
            f"The limit on locked memory is {format_bytes(host.memlock_limit_bytes)}. In containers where the driver "
            "enforces it, pinning more fails. Raise it with `ulimit -l`."
        )
    if host.transparent_huge_pages == "never" and not host.huge_pages_free:
        yield "There are no huge pages, so pinning memory takes longer; offloading itself is not slower."
    if (host.numa_nodes or 1) > 1 and any(gpu.numa_node is None for gpu in gpus):
        yield (
            "This host has several NUMA nodes and does not say which one is nearest to the GPU. Copies of pinned "
            "memory on another node are slower."
        )
