"""One sentence for each missing thing: what it means for a user who wants to train."""

from __future__ import annotations

from collections.abc import Iterator

from vdnn.bytesize import format_bytes
from vdnn.doctor.facts import CodecFacts, DriverFacts, ExtensionFacts, GpuFacts, HostFacts, TorchFacts

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
