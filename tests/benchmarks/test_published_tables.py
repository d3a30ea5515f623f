"""Tables of the vDNN paper's networks, computed from shapes under stated conventions.

Conventions (all of benchmarks/vdnn_paper/vdnn_2016.py): fp32; ReLU and concatenation in place, no local response
normalization, no auxiliary classifiers, no dropout; AlexNet on 227 x 227 without groups, OverFeat the fast model; no
workspaces. MiB and GiB are powers of two, GB is 1e9. The figures are not the paper's bars, which include cuDNN-4
workspaces. They follow from the shapes alone, by the paper's rules, and another program computed the expected values.
"""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.vdnn_paper.vdnn_2016 import (
    ALL,
    CONVOLUTIONS,
    GB,
    GIB,
    MIB,
    NETWORKS,
    NONE,
    Kind,
    Network,
    main,
    network_of,
    replay,
)


@cache
def network(title: str) -> Network:
    return network_of(*NETWORKS[title])


def x_of_layers(title: str) -> list[float]:
    return [layer.x_bytes / MIB for layer in network(title).layers]


def weights_mib(title: str, *kinds: Kind) -> float:
    return sum(layer.parameter_bytes for layer in network(title).layers if layer.kind in kinds) / MIB


# The input X of each layer, in MiB.


def test_vgg_16_reads_these_maps() -> None:
    group_1, group_2 = [36.75, 784, 784], [196, 392, 392]
    group_3, group_4, group_5 = [98, 196, 196, 196], [49, 98, 98, 98], [24.5] * 4
    classifier = [6.125, 1, 1]
    assert x_of_layers("VGG-16 (64)") == [*group_1, *group_2, *group_3, *group_4, *group_5, *classifier]
    assert x_of_layers("VGG-16 (256)") == [4 * x for x in x_of_layers("VGG-16 (64)")]
    assert weights_mib("VGG-16 (64)", Kind.CONVOLUTION) == pytest.approx(56.1, abs=0.05)
    assert weights_mib("VGG-16 (64)", Kind.LINEAR) == pytest.approx(471.7, abs=0.05)


def test_alexnet_reads_these_maps() -> None:
    features = [75.48, 141.80, 34.17, 91.12, 21.12, 31.69, 31.69, 21.12]
    assert x_of_layers("AlexNet (128)") == pytest.approx([*features, 4.5, 2, 2], abs=0.006)
    assert weights_mib("AlexNet (128)", Kind.CONVOLUTION) == pytest.approx(14.3, abs=0.05)
    assert weights_mib("AlexNet (128)", Kind.LINEAR) == pytest.approx(223.7, abs=0.05)


def test_overfeat_reads_these_maps() -> None:
    features = [78.17, 147, 36.75, 72, 18, 36, 72, 72]
    assert x_of_layers("OverFeat (128)") == pytest.approx([*features, 18, 1.5, 2], abs=0.006)
    assert weights_mib("OverFeat (128)", Kind.CONVOLUTION) == pytest.approx(61, abs=0.5)
    assert weights_mib("OverFeat (128)", Kind.LINEAR) == pytest.approx(495.7, abs=0.05)


def test_googlenet_reads_these_maps() -> None:
    """Each module has four maps: the outputs of its two reductions, of its pooling, and of its four branches
    together."""
    found = network("GoogLeNet (128)")
    layers = list(found.layers)
    assert [layer.y_bytes / MIB for layer in layers[:5]] == [392, 98, 98, 294, 73.5]
    outputs, inner = [], []
    place = 5
    for module in ("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
        one, reduce_three, three, reduce_five, five, pooling, behind = layers[place : place + 7]
        place += 7
        output = layers[place].x_bytes  # the input of the next layer
        assert output == sum(branch.y_bytes for branch in (one, three, five, behind))
        outputs.append(output / MIB)
        inner.append((reduce_three.y_bytes + reduce_five.y_bytes + pooling.y_bytes + output) / MIB)
        place += module in ("3b", "4e")  # a pooling layer follows
    assert outputs == pytest.approx([98, 183.8, 49, 49, 49, 50.5, 79.6, 19.9, 24.5], abs=0.06)
    assert inner == pytest.approx([214.4, 343.0, 105.7, 111.0, 112.5, 116.4, 148.5, 44.4, 50.1], abs=0.06)
    assert found.parameter_bytes / 1e6 == pytest.approx(28, abs=0.05)


# Sums over each network.

# Feature maps GB, largest GB, weights GB, baseline GiB: all maps, weights, their gradients and two of the largest map.
SUMS = {
    "AlexNet (128)": (0.479, 0.149, 0.250, 1.19),
    "OverFeat (128)": (0.581, 0.154, 0.584, 1.92),
    "GoogLeNet (128)": (2.455, 0.411, 0.028, 3.10),
    "VGG-16 (64)": (3.90, 0.822, 0.553, 6.20),
    "VGG-16 (128)": (7.80, 1.644, 0.553, 11.36),
    "VGG-16 (256)": (15.60, 3.288, 0.553, 21.69),
    "VGG-116 (32)": (17.62, 0.411, 0.993, 19.03),
    "VGG-216 (32)": (33.29, 0.411, 1.433, 34.44),
    "VGG-316 (32)": (48.96, 0.411, 1.872, 49.85),
    "VGG-416 (32)": (64.63, 0.411, 2.312, 65.27),
}
# GB that vDNN may offload: the inputs of convolutions and poolings, and of convolutions only. The network's input stays
# on the device and is not counted.
OFFLOADABLE = {
    "AlexNet (128)": (0.39, 0.12),
    "OverFeat (128)": (0.48, 0.17),
    "VGG-16 (64)": (3.85, 2.29),
    "VGG-16 (128)": (7.71, 4.57),
    "VGG-16 (256)": (15.41, 9.15),
    "VGG-116 (32)": (17.60, 16.81),
    "VGG-216 (32)": (33.27, 32.49),
    "VGG-316 (32)": (48.94, 48.16),
    "VGG-416 (32)": (64.61, 63.83),
}


@pytest.mark.parametrize("title", SUMS)
def test_maps_weights_and_the_baseline_add_up(title: str) -> None:
    found = network(title)
    maps, largest, weights, baseline = SUMS[title]
    assert found.feature_map_bytes / GB == pytest.approx(maps, abs=0.0051)
    assert found.largest_map_bytes / GB == pytest.approx(largest, abs=0.0006)
    assert found.parameter_bytes / GB == pytest.approx(weights, abs=0.0006)
    assert found.baseline_bytes / GIB == pytest.approx(baseline, abs=0.0051)


@pytest.mark.parametrize("title", OFFLOADABLE)
def test_what_may_leave_adds_up(title: str) -> None:
    found = network(title)
    of_all, of_convolutions = OFFLOADABLE[title]
    assert found.offloadable_bytes(ALL) / GB == pytest.approx(of_all, abs=0.0051)
    assert found.offloadable_bytes(CONVOLUTIONS) / GB == pytest.approx(of_convolutions, abs=0.0051)


# The replay: feature extraction only; memory-optimal algorithms (no workspace); dW is allocated for its wgrad only; the
# input is kept; each layer's forward and backward is one step; the mean is over the peaks of the steps. In GiB: the
# baseline, then highest and mean with release only, with vDNN_conv and with vDNN_all.
REPLAY = {
    "AlexNet (128)": (0.75, (0.48, 0.41), (0.48, 0.38), (0.43, 0.24)),
    "OverFeat (128)": (0.94, (0.68, 0.49), (0.60, 0.45), (0.50, 0.31)),
    "VGG-16 (64)": (5.27, (3.73, 3.08), (2.77, 1.72), (2.77, 0.72)),
    "VGG-16 (128)": (10.43, (7.40, 6.11), (5.49, 3.38), (5.49, 1.39)),
    "VGG-16 (256)": (20.76, (14.75, 12.16), (10.92, 6.71), (10.92, 2.72)),
    "VGG-116 (32)": (18.10, (16.89, 12.88), (2.01, 1.38), (2.01, 0.90)),
    "VGG-416 (32)": (64.34, (61.9, 46.6), (3.24, 2.61), (3.24, 2.14)),
}
# The expected figures have two decimals, and the two programs differ by up to 0.3 MiB. Three figures are that close to
# a rounding boundary (OverFeat's 0.49 and 0.50, VGG-116's 1.38; ours print as 0.48, 0.49 and 1.37).
PRINTED_GIB = 0.005 + 0.0003
# Reductions against that baseline in per cent: vDNN_conv highest and mean, vDNN_all highest and mean.
REDUCTIONS = {
    "AlexNet (128)": (36, 50, 42, 68),
    "OverFeat (128)": (37, 52, 48, 67),
    "VGG-16 (64)": (47, 67, 47, 86),
    "VGG-16 (128)": (47, 68, 47, 87),
    "VGG-16 (256)": (47, 68, 47, 87),
    "VGG-116 (32)": (89, 92, 89, 95),
    "VGG-416 (32)": (95, 96, 95, 97),
}


@pytest.mark.parametrize("title", REPLAY)
def test_the_rules_of_2016_need_so_much(title: str) -> None:
    features = network(title).feature_extraction()
    baseline, *expected = REPLAY[title]
    assert features.baseline_bytes / GIB == pytest.approx(baseline, abs=0.0051)
    reductions = []
    for kinds, (most, mean) in zip((NONE, CONVOLUTIONS, ALL), expected, strict=True):
        found = replay(features, kinds)
        printed = 0.05 if most > 40 else PRINTED_GIB  # the largest network's figures have one decimal
        assert found.most_bytes / GIB == pytest.approx(most, abs=printed)
        assert found.mean_bytes / GIB == pytest.approx(mean, abs=printed)
        reductions += [100 * (1 - nbytes / features.baseline_bytes) for nbytes in found]
    assert reductions[2:] == pytest.approx(REDUCTIONS[title], abs=1)


def test_the_papers_averages_need_workspaces_that_shapes_do_not_have() -> None:
    """The abstract states 89 % for AlexNet and 91 % for OverFeat. It compares means, and its baseline includes
    cuDNN-4's performance-optimal workspaces. Without workspaces the reduction is two thirds. VGG-416, which consists
    almost entirely of maps, comes within one point of the published 98 %."""
    assert 1 - replay(network("AlexNet (128)").feature_extraction(), ALL).mean_bytes / (0.75 * GIB) < 0.70
    assert 1 - replay(network("OverFeat (128)").feature_extraction(), ALL).mean_bytes / (0.94 * GIB) < 0.70
    # The paper has 28 GB for VGG-16 (256): 6.3 GiB more than shapes give, about 25 MiB an image.
    assert (28 * GIB - network("VGG-16 (256)").baseline_bytes) / MIB / 256 == pytest.approx(25, abs=0.5)
    # The paper trains it on 12 GB with vDNN_all, memory-optimal, so it has to fit by these rules.
    assert replay(network("VGG-16 (256)").feature_extraction(), ALL).most_bytes < 12 * GIB


@pytest.mark.slow
def test_both_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    said = capsys.readouterr().out
    assert "VGG-16 (256)" in said
    assert "10.92/2.72" in said
    assert "-47/-87 %" in said
