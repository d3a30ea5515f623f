"""The ten networks of the vDNN paper with their batch sizes.

Rhu and others, MICRO 2016, section IV: conventional networks at usual batch sizes, and very deep VGG networks at batch
32. According to the paper, the last four, and VGG-16 from batch 128 on, do not train on its Titan X of 12 GB without
vDNN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.models.alexnet import alexnet
from benchmarks.models.googlenet import googlenet
from benchmarks.models.overfeat import overfeat
from benchmarks.models.vgg import vgg16, vgg116, vgg216, vgg316, vgg416
from benchmarks.models.workload import Workload


@dataclass(frozen=True, slots=True)
class VdnnNetwork:
    """One group of bars of the paper's figures. `trains_without` is True if the paper trains it without vDNN."""

    name: str
    make: Callable[[int], Workload]
    batch: int
    trains_without: bool

    @property
    def title(self) -> str:
        """The title as in the paper: "VGG-16 (256)"."""
        return f"{self.name} ({self.batch})"

    def workload(self) -> Workload:
        return self.make(self.batch)


VDNN_NETWORKS = (
    VdnnNetwork("AlexNet", alexnet, 128, trains_without=True),
    VdnnNetwork("OverFeat", overfeat, 128, trains_without=True),
    VdnnNetwork("GoogLeNet", googlenet, 128, trains_without=True),
    VdnnNetwork("VGG-16", vgg16, 64, trains_without=True),
    VdnnNetwork("VGG-16", vgg16, 128, trains_without=False),
    VdnnNetwork("VGG-16", vgg16, 256, trains_without=False),
    VdnnNetwork("VGG-116", vgg116, 32, trains_without=False),
    VdnnNetwork("VGG-216", vgg216, 32, trains_without=False),
    VdnnNetwork("VGG-316", vgg316, 32, trains_without=False),
    VdnnNetwork("VGG-416", vgg416, 32, trains_without=False),
)
