"""An operation's time follows its class: how much of the card's peaks it reaches, and the time to fill the card."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from vdnn.hardware import HardwareProfile, load_profile
from vdnn.runtime.machine import roofline
from vdnn.runtime.machine.operation_class import converted_maps, padded_share
from vdnn.runtime.machine.virtual_machine import VirtualMachine


def profile_with(efficiency: dict[str, float] | None = None, fill_ns: dict[str, int] | None = None) -> HardwareProfile:
    """The P100, which has no figures by class, with those."""
    plain = load_profile("p100")
    keys = [f"efficiency.{key}" for key in efficiency or ()] + [f"fill_ns.{key}" for key in fill_ns or ()]
    sources = {**plain.sources, **dict.fromkeys(keys, "for this test")}
    return replace(plain, efficiency=efficiency or {}, fill_ns=fill_ns or {}, sources=sources)


def forward_ns(profile: HardwareProfile, layer: Any, *shape: int, channels_last: bool = False) -> int:
    with VirtualMachine(profile) as machine, torch.no_grad():
        made, x = layer(), torch.empty(*shape)
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        begin_ns = machine.now_ns
        made(x)
        return machine.now_ns - begin_ns


CONVOLUTIONS: dict[str, tuple[Any, bool]] = {
    "convolution": (lambda: nn.Conv2d(256, 256, 5, padding=2, bias=False), False),
    "convolution_3x3": (lambda: nn.Conv2d(256, 256, 3, padding=1, bias=False), False),
    "convolution_channels_last": (lambda: nn.Conv2d(256, 256, 3, padding=1, bias=False), True),
    "convolution_grouped": (lambda: nn.Conv2d(256, 256, 3, padding=1, groups=2, bias=False), False),
    "convolution_depthwise": (lambda: nn.Conv2d(256, 256, 31, padding=15, groups=256, bias=False), False),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_reaches_what_its_class_reaches(name: str) -> None:
    layer, is_last = CONVOLUTIONS[name]
    half = profile_with({f"{name}.float32": 0.445})  # half of the P100's 0.89
    launch_ns = half.kernel_launch_ns
    plain_ns = forward_ns(profile_with(), layer, 8, 256, 56, 56, channels_last=is_last) - launch_ns
    assert forward_ns(half, layer, 8, 256, 56, 56, channels_last=is_last) - launch_ns == pytest.approx(2 * plain_ns)


def test_a_first_layer_has_few_channels() -> None:
    def layer() -> nn.Module:
        return nn.Conv2d(3, 64, 7, 2, 3, bias=False)

    slow = profile_with({"convolution_few_channels.float32": 0.089})
    assert forward_ns(slow, layer, 8, 3, 224, 224) > 5 * forward_ns(profile_with(), layer, 8, 3, 224, 224)

    def of_enough() -> nn.Module:
        return nn.Conv2d(8, 64, 7, 2, 3, bias=False)

    assert forward_ns(slow, of_enough, 8, 8, 224, 224) == forward_ns(profile_with(), of_enough, 8, 8, 224, 224)


def test_a_class_without_a_figure_takes_that_of_the_wider_class() -> None:
    layer, _ = CONVOLUTIONS["convolution_depthwise"]
    grouped = forward_ns(profile_with({"convolution_grouped.float32": 0.1}), layer, 8, 256, 56, 56)
    wider = forward_ns(profile_with({"convolution.float32": 0.1}), layer, 8, 256, 56, 56)
    assert grouped == wider > forward_ns(profile_with(), layer, 8, 256, 56, 56)


def test_a_strided_convolution_is_not_that_of_winograd() -> None:
    def strided() -> nn.Module:
        return nn.Conv2d(256, 256, 3, 2, 1, bias=False)

    fast = profile_with({"convolution_3x3.float32": 2.0})
    assert forward_ns(fast, strided, 8, 256, 56, 56) == forward_ns(profile_with(), strided, 8, 256, 56, 56)


def test_each_gradient_of_a_convolution_fills_the_card_once() -> None:
    def step_ns(profile: HardwareProfile, *, input_too: bool) -> int:
        with VirtualMachine(profile) as machine:
            layer, x = nn.Conv2d(64, 64, 3), torch.empty(8, 64, 32, 32, requires_grad=input_too)
            begin_ns = machine.now_ns
            layer(x).backward(torch.empty(8, 64, 30, 30))
            return machine.now_ns - begin_ns

    filled = profile_with(fill_ns={"convolution.float32": 7000})
    for input_too, kernels in ((False, 2), (True, 3)):
        assert step_ns(filled, input_too=input_too) - step_ns(profile_with(), input_too=input_too) == 7000 * kernels


def test_a_small_product_loses_more_of_its_efficiency_than_a_large_one() -> None:
    filled = profile_with(fill_ns={"product.float32": 20000})

    def loss(size: int) -> float:
        def layer() -> nn.Module:
            return nn.Linear(size, size, bias=False)

        return forward_ns(filled, layer, size, size) / forward_ns(profile_with(), layer, size, size)

    assert loss(128) > 3
    assert loss(4096) < 1.01


def test_batch_norms_reach_less_of_the_memory() -> None:
    def layer() -> nn.Module:
        return nn.BatchNorm2d(64)

    half = profile_with({"batch_normalization": 0.355})
    plain_ns, half_ns = (forward_ns(one, layer, 64, 64, 56, 56) for one in (profile_with(), half))
    launches_ns = 2 * half.kernel_launch_ns  # the count of batches is increased by a kernel of its own
    assert half_ns - launches_ns == pytest.approx(2 * (plain_ns - launches_ns), rel=0.01)


def test_a_product_of_many_dimensions_costs_its_product_alone() -> None:
    profile = load_profile("h100")
    with VirtualMachine(profile) as machine, torch.no_grad():
        x, weight = torch.empty(8, 512, 1024), torch.empty(1024, 1024)
        begin_ns = machine.now_ns
        torch.matmul(x, weight)
        many_ns, begin_ns = machine.now_ns - begin_ns, machine.now_ns
        torch.mm(x.view(-1, 1024), weight)
        assert many_ns == machine.now_ns - begin_ns


def test_maps_are_converted_for_tensor_cores_unless_they_are_channels_last() -> None:
    plain = load_profile("a100-80")
    kept = {key: value for key, value in plain.efficiency.items() if key != roofline.LAYOUT_CONVERSION}
    without = replace(plain, efficiency=kept)

    def layer() -> nn.Module:
        return nn.Conv2d(256, 128, 1, bias=False)

    def ns(profile: HardwareProfile, precision: str, *, channels_last: bool) -> int:
        cudnn: Any = torch.backends.cudnn
        before, cudnn.conv.fp32_precision = cudnn.conv.fp32_precision, precision
        try:
            return forward_ns(profile, layer, 32, 256, 56, 56, channels_last=channels_last)
        finally:
            cudnn.conv.fp32_precision = before

    moved = 2 * 4 * 32 * (256 + 128) * 56 * 56  # each map is read and written once more
    converting_ns = moved / (plain.memory_bytes_per_s * plain.efficiency[roofline.LAYOUT_CONVERSION]) * 1e9
    assert ns(plain, "tf32", channels_last=False) - ns(without, "tf32", channels_last=False) == pytest.approx(
        converting_ns, abs=1
    )
    assert ns(plain, "tf32", channels_last=True) == ns(without, "tf32", channels_last=True)
    assert ns(plain, "ieee", channels_last=False) == ns(without, "ieee", channels_last=False)


@pytest.mark.parametrize(("of_input", "of_weight", "maps"), [(True, True, 4), (True, False, 2), (False, True, 2)])
def test_each_gradient_of_a_convolution_converts_its_own_two_maps(of_input: bool, of_weight: bool, maps: int) -> None:
    x = torch.empty(2, 8, 4, 4)
    gradient, weight = torch.empty(2, 8, 4, 4), torch.empty(8, 8, 1, 1)
    geometry = ([0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [of_input, of_weight, False])
    made = (x if of_input else None, weight if of_weight else None, None)
    converted = converted_maps("convolution_backward", (gradient, x, weight, *geometry), made)
    assert len(converted) == maps
    assert all(one.shape == x.shape for one in converted)


def test_a_product_of_a_short_inner_dimension_pays_for_the_begin_and_the_end_of_its_tiles() -> None:
    plain = profile_with()
    overhead = replace(
        plain,
        tile_overhead={"product.float32": 100},
        sources={**plain.sources, "tile_overhead.product.float32": "test"},
    )
    for inner in (128, 4096):

        def layer(inner: int = inner) -> nn.Module:
            return nn.Linear(inner, 4096, bias=False)

        with_ns, without_ns = (
            forward_ns(one, layer, 8192, inner) - plain.kernel_launch_ns for one in (overhead, plain)
        )
        assert with_ns == pytest.approx(without_ns * (1 + 100 / inner), rel=1e-3)


def test_kernels_on_tensor_cores_compute_whole_tiles() -> None:
    profile = load_profile("a100-80")

    def ns(outputs: int, dtype: torch.dtype) -> int:
        with VirtualMachine(profile) as machine, torch.no_grad():
            x, weight = torch.empty(8192, 8192, dtype=dtype), torch.empty(8192, outputs, dtype=dtype)
            begin_ns = machine.now_ns
            torch.mm(x, weight)
            return machine.now_ns - begin_ns

    assert ns(4033, torch.float16) == pytest.approx(ns(4096, torch.float16), rel=1e-3)
    assert ns(4032, torch.float16) < 0.99 * ns(4033, torch.float16)
    assert ns(4033, torch.float32) < 0.99 * ns(4096, torch.float32)  # not on tensor cores


@pytest.mark.parametrize(
    ("inputs", "outputs", "forward", "backward"),
    [
        (64, 64, 1.0, 1.0),
        (128, 32, 2.0, (1.0 + 2.0) / 2),  # the gradient of the input has 128 columns, that of the weight 32 rows
        (96, 64, 1.0, (128 / 96 + 896 / 864) / 2),  # 864 columns of the weight's gradient
        (3, 64, 1.0, 1.0),  # a class of its own
    ],
)
def test_a_convolution_is_padded_to_whole_tiles(inputs: int, outputs: int, forward: float, backward: float) -> None:
    x, weight = torch.empty(2, inputs, 8, 8), torch.empty(outputs, inputs, 3, 3)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert padded_share("convolution", (x, weight, None, *rest)) == pytest.approx(forward)
    both = (torch.empty(2, outputs, 8, 8), x, weight, None, *rest, [True, True, False])
    assert padded_share("convolution_backward", both) == pytest.approx(backward)


def test_each_gradient_of_a_grouped_convolution_takes_what_its_forward_pass_takes() -> None:
    profile = profile_with({"convolution_grouped.float32": 0.001})  # so slow that arithmetic decides

    def times(groups: int) -> tuple[int, int]:
        with VirtualMachine(profile) as machine:
            layer = nn.Conv2d(64, 64, 3, padding=1, groups=groups, bias=False)
            x = torch.empty(8, 64, 32, 32, requires_grad=True)
            begin_ns = machine.now_ns
            out = layer(x)
            between_ns = machine.now_ns
            out.backward(torch.empty_like(out))
            launch_ns = profile.kernel_launch_ns
            return between_ns - begin_ns - launch_ns, machine.now_ns - between_ns - launch_ns

    for groups in (2, 64):
        forward_pass_ns, backward_pass_ns = times(groups)
        assert backward_pass_ns == pytest.approx(2 * forward_pass_ns, rel=0.01)


def test_maps_of_a_depthwise_convolution_are_not_converted() -> None:
    x, weight = torch.empty(2, 64, 8, 8), torch.empty(64, 1, 3, 3)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0])
    assert converted_maps("convolution", (x, weight, None, *rest, 64), x) == []
    dense = torch.empty(64, 64, 3, 3)
    assert len(converted_maps("convolution", (x, dense, None, *rest, 1), x)) == 2
