"""Computes vDNN's memory of 2016 from shapes: its maps, their sums, and a replay of its rules.

    python -m benchmarks.vdnn_paper.vdnn_2016

Hooks take the shapes of our networks in a step without data. The conventions are those of the paper's framework (Rhu
and others, MICRO 2016; read in two reimplementations), not PyTorch's: a layer is a convolution, a pooling or a linear
layer; ReLU and concatenation are in place and own no map; nothing has a workspace (cuDNN's memory-optimal algorithms).
X is the map that a layer reads, Y the map that it writes; the map between two layers is one map.

The baseline has all maps all the time, weights and their gradients, and two buffers of the largest map for dX and dY.
See replay() for the replay. GiB are 2^30, GB 1e9.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import models
from benchmarks.models.workload import Workload
from benchmarks.text_table import render_table

MIB, GIB, GB = 2**20, 2**30, 10**9


class Kind(Enum):
    CONVOLUTION = "conv"
    POOLING = "pool"
    LINEAR = "fc"


class Layer(NamedTuple):
    """One layer. `x` and `y` are the names of the maps that it reads and writes; `parameter_bytes` are its weights and
    bias."""

    kind: Kind
    x: int
    y: int
    x_bytes: int
    y_bytes: int
    parameter_bytes: int

    @property
    def is_feature_extraction(self) -> bool:
        return self.kind is not Kind.LINEAR


class Network(NamedTuple):
    """Layers in the order of the forward pass, and the bytes of every map by its name."""

    layers: tuple[Layer, ...]
    map_bytes: dict[int, int]

    @property
    def feature_map_bytes(self) -> int:
        return sum(self.map_bytes.values())

    @property
    def largest_map_bytes(self) -> int:
        return max(self.map_bytes.values())

    @property
    def parameter_bytes(self) -> int:
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def baseline_bytes(self) -> int:
        """The bytes of a network-wide allocation without workspaces."""
        return self.feature_map_bytes + 2 * self.parameter_bytes + 2 * self.largest_map_bytes

    def offloadable_bytes(self, kinds: Sequence[Kind]) -> int:
        """The bytes of the maps that layers of these kinds read, each once. vDNN never frees the input."""
        first = self.layers[0].x
        return sum(self.map_bytes[one] for one in {layer.x for layer in self.layers if layer.kind in kinds} - {first})

    def feature_extraction(self) -> Network:
        """The network without its linear layers: the part that vDNN manages."""
        layers = tuple(layer for layer in self.layers if layer.is_feature_extraction)
        named = {name for layer in layers for name in (layer.x, layer.y)}
        return Network(layers, {name: nbytes for name, nbytes in self.map_bytes.items() if name in named})


# Shapes.

_KINDS: dict[type[nn.Module], Kind] = {
    nn.Conv2d: Kind.CONVOLUTION,
    nn.MaxPool2d: Kind.POOLING,
    nn.AvgPool2d: Kind.POOLING,
    nn.Linear: Kind.LINEAR,
}


def network_of(make: Callable[[int], Workload], batch: int) -> Network:
    """The layers of one forward pass without data. A map is a storage: an in-place ReLU and a flattening have the map
    that they read. A map that is only concatenated is a part of the concatenation, and counted there."""
    layers: list[Layer] = []
    names: dict[int, int] = {}
    held: list[Tensor] = []  # keeps all tensors alive, so that no storage is reused

    def name_of(tensor: Tensor) -> int:
        held.append(tensor)
        return names.setdefault(tensor.untyped_storage()._cdata, len(names))

    def saw(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        parameters = sum(one.numel() * one.element_size() for one in module.parameters())
        (x,) = inputs
        layers.append(
            Layer(_KINDS[type(module)], name_of(x), name_of(output), _bytes_of(x), _bytes_of(output), parameters)
        )

    with FakeTensorMode(), torch.no_grad():
        workload = make(batch)
        for module in workload.model.modules():
            if type(module) in _KINDS:
                module.register_forward_hook(saw)
        workload.model(*workload.inputs)
    return Network(tuple(layers), _maps(layers))


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _maps(layers: Sequence[Layer]) -> dict[int, int]:
    """The bytes of all maps that are read, and of the last layer's output. A map that is written but never read is a
    part of a concatenation."""
    maps = {layer.x: layer.x_bytes for layer in layers}
    return maps | {layers[-1].y: layers[-1].y_bytes}


# The replay.


class Replayed(NamedTuple):
    """The peaks of the steps of the replay: the highest, and the mean of all."""

    most_bytes: int
    mean_bytes: float


def replay(network: Network, kinds: Sequence[Kind]) -> Replayed:
    """Replay one iteration of a chain of feature-extraction layers under vDNN's rules. Offloads the X of `kinds`.

    Weights are always resident, dW is there while wgrad runs. In the forward pass Y is allocated, the layer runs and X
    is offloaded; at the layer's end X is freed. The input is kept. In the backward pass, from the last layer: the X of
    the layer is reloaded if it is still on the host; a convolution frees Y and has dW during its wgrad; then the layer
    to prefetch is searched, and its X and this layer's dX are allocated; at the end dY is freed, and Y of a pooling.
    The first layer makes no dX. A step is the forward or the backward pass of a layer, and its peak is the highest
    within it, including its beginning.
    """
    layers = network.layers
    live = sum(layer.parameter_bytes for layer in layers) + layers[0].x_bytes
    is_offloaded = [index > 0 and layer.kind in kinds for index, layer in enumerate(layers)]
    peaks = []
    for index, layer in enumerate(layers):
        live += layer.y_bytes
        peaks.append(live)
        if is_offloaded[index]:
            live -= layer.x_bytes
    is_on_host = list(is_offloaded)
    live += layers[-1].y_bytes  # its dY
    for index in reversed(range(len(layers))):
        layer = layers[index]
        if is_on_host[index]:
            is_on_host[index] = False
            live += layer.x_bytes
        dx_bytes = layer.x_bytes if index > 0 else 0
        peak = live
        if layer.kind is Kind.CONVOLUTION:
            live -= layer.y_bytes
            peak = max(peak, live + layer.parameter_bytes)
        prefetched = _layer_to_prefetch(layers, is_on_host, index)
        if prefetched is not None:
            is_on_host[prefetched] = False
            live += layers[prefetched].x_bytes
        live += dx_bytes
        peaks.append(max(peak, live))
        live -= layer.y_bytes * (1 if layer.kind is Kind.CONVOLUTION else 2)
    return Replayed(max(peaks), sum(peaks) / len(peaks))


def _layer_to_prefetch(layers: Sequence[Layer], is_on_host: Sequence[bool], current: int) -> int | None:
    """The paper's Figure 10: the nearest earlier layer whose X is on the host. A convolution whose X is not on the host
    ends the search."""
    for index in reversed(range(current)):
        if is_on_host[index]:
            return index
        if layers[index].kind is Kind.CONVOLUTION:
            return None
    return None


# The tables.

ALL = (Kind.CONVOLUTION, Kind.POOLING)
CONVOLUTIONS = (Kind.CONVOLUTION,)
NONE: tuple[Kind, ...] = ()
NETWORKS: dict[str, tuple[Callable[[int], Workload], int]] = {
    "AlexNet (128)": (models.alexnet_227, 128),
    "OverFeat (128)": (models.overfeat, 128),
    "GoogLeNet (128)": (models.googlenet, 128),
    "VGG-16 (64)": (models.vgg16, 64),
    "VGG-16 (128)": (models.vgg16, 128),
    "VGG-16 (256)": (models.vgg16, 256),
    "VGG-116 (32)": (models.vgg116, 32),
    "VGG-216 (32)": (models.vgg216, 32),
    "VGG-316 (32)": (models.vgg316, 32),
    "VGG-416 (32)": (models.vgg416, 32),
}
BRANCHED = "GoogLeNet (128)"  # not replayed, because it is not a chain


def main() -> int:
    networks = {title: network_of(make, batch) for title, (make, batch) in NETWORKS.items()}
    header = ("network", "maps GB", "largest GB", "weights GB", "baseline GiB", "X of all GB", "X of conv GB")
    rows = [
        (
            title,
            f"{one.feature_map_bytes / GB:.3f}",
            f"{one.largest_map_bytes / GB:.3f}",
            f"{one.parameter_bytes / GB:.3f}",
            f"{one.baseline_bytes / GIB:.2f}",
            f"{one.offloadable_bytes(ALL) / GB:.2f}",
            f"{one.offloadable_bytes(CONVOLUTIONS) / GB:.2f}",
        )
        for title, one in networks.items()
    ]
    print(render_table("Maps and baselines of 2016, without workspaces", header, rows), end="\n\n")
    replays = [_replay_row(title, one.feature_extraction()) for title, one in networks.items() if title != BRANCHED]
    header = ("feature extraction", "baseline GiB", "release only", "vDNN_conv", "", "vDNN_all", "")
    remarks = ["Highest and mean peak of a layer's step in GiB, and both against the baseline."]
    print(render_table("Replay of vDNN's rules, memory-optimal algorithms", header, replays, remarks))
    return 0


def _replay_row(title: str, network: Network) -> tuple[str, ...]:
    columns = [title, f"{network.baseline_bytes / GIB:.2f}"]
    for kinds in (NONE, CONVOLUTIONS, ALL):
        found = replay(network, kinds)
        columns.append(f"{found.most_bytes / GIB:.2f}/{found.mean_bytes / GIB:.2f}")
        if kinds:
            less = (1 - nbytes / network.baseline_bytes for nbytes in found)
            columns.append("/".join(f"-{100 * part:.0f}" for part in less) + " %")
    return tuple(columns)


if __name__ == "__main__":
    sys.exit(main())
