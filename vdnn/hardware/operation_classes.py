"""The classes of operations for which a hardware profile may have figures of its own.

Figures of arithmetic are by class and dtype, as in "convolution.tf32"; those of memory traffic are by class alone. A
profile need not have a figure for each class. An operation has a list of classes, the narrowest first, and takes the
figure of the first one that has a figure. Without any, `compute_efficiency` or `bandwidth_efficiency` holds.
"""

from __future__ import annotations

COMPUTE_CLASSES = (
    "product",
    "attention",
    "convolution",
    "convolution_3x3",  # of stride 1: Winograd's algorithm multiplies less often than is counted
    "convolution_1x1",
    "convolution_channels_last",
    "convolution_few_channels",  # fewer than 8 input channels
    "convolution_few_channels_last",  # the same, channels last
    "convolution_grouped",
    "convolution_depthwise",
)
# "layout_conversion": cuDNN's tensor cores convolve channels last, and other maps are converted before and after. A
# profile without this figure is of a card whose kernels take both.
LAYOUT_CONVERSION = "layout_conversion"
BANDWIDTH_CLASSES = ("elementwise", "normalization", "batch_normalization", LAYOUT_CONVERSION)
# Kernels of these take `fill_ns` in addition.
FILLED_CLASSES = ("product", "attention", "convolution")
# Kernels of these take `tile_overhead` columns of their inner dimension in addition.
TILED_CLASSES = ("product",)
# The multiplications of a 3 x 3 convolution, over those of Winograd's F(4 x 4, 3 x 3).
MOST_EFFICIENCY = 4.0
