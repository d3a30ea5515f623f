"""The four machines of the matrix: what each reaches, and the source of each figure.

`flops_per_s` is what products of matrices in bfloat16 reach in a training, not the peak of the card. A step on the CPU
may use all of the host's memory bandwidth, which favors the systems that step there.
"""

from __future__ import annotations

from dataclasses import dataclass

from vdnn.planning.costs import LinkCosts
from vdnn.planning.training.training import TrainingMachine

_GB, _GIB = 1_000_000_000, 1 << 30
_LATENCY_NS = 10_000  # assumption, as in the hardware profiles


@dataclass(frozen=True, slots=True)
class Machine:
    """`card_bytes` is the memory that a training can have. `sources` says where the rates are from."""

    card_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    training_machine: TrainingMachine
    sources: str

    @property
    def name(self) -> str:
        return self.training_machine.name


def _machine(
    name: str,
    *,
    card_gib: float,
    tflops: float,
    memory_gb: float,
    link_gb: tuple[float, float],
    host_gib: int,
    host_gb: float,
    sources: str,
) -> Machine:
    """`link_gb`: one direction, and both together."""
    link = LinkCosts(link_gb[0] * _GB, link_gb[0] * _GB, link_gb[1] * _GB, _LATENCY_NS)
    host = TrainingMachine(name, link, host_gib * _GIB, host_gb * _GB, host_gb * _GB)
    return Machine(int(card_gib * _GIB), tflops * 1e12, memory_gb * _GB, host, sources)


MACHINES = (
    _machine(
        "RTX 4090",
        card_gib=23.6,
        tflops=115,
        memory_gb=917,
        link_gb=(25, 37),
        host_gib=128,
        host_gb=60,
        sources="memory, link and both directions as vdnn/hardware/profiles/rtx-4090.json; 115 TFLOP/s as its measured "
        "117.6; host: assumption, two channels of DDR5-5600, of 90 GB/s at most",
    ),
    _machine(
        "RTX 5090",
        card_gib=31.3,
        tflops=147,
        memory_gb=1630,
        link_gb=(52, 87),
        host_gib=192,
        host_gb=75,
        sources="assumption: 0.7 of NVIDIA's 209.5 TFLOP/s dense with float32 sums, 0.91 of 1.79 TB/s, the link as an "
        "H100's on PCIe gen 5; host: assumption, two channels of DDR5-6400, of 102 GB/s at most",
    ),
    _machine(
        "H100",
        card_gib=79,
        tflops=590,
        memory_gb=2980,
        link_gb=(52, 87),
        host_gib=256,
        host_gb=250,
        sources="memory, link and both directions as vdnn/hardware/profiles/h100.json; assumption: 0.6 of the peak; "
        "host: assumption, one socket with eight channels of DDR5-4800, of 307 GB/s at most",
    ),
    _machine(
        "GH200",
        card_gib=95,
        tflops=590,
        memory_gb=3600,
        link_gb=(350, 380),
        host_gib=480,
        host_gb=380,
        sources="assumption: computing as an H100; 0.9 of 4 TB/s of HBM3; NVLink-C2C of 450 GB/s a direction at most, "
        "and both directions together no faster than the host's LPDDR5X, 0.76 of 500 GB/s",
    ),
)
