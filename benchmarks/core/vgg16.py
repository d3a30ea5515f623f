"""VGG-16 as numbers: the shapes of its thirteen convolutions, and their times on a device of a given speed.

Simonyan and Zisserman 2014, configuration D, on 224 x 224 images. Fully connected layers are omitted: they have less
than 1% of the activations and of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

IMAGE_CHANNELS = 3
KERNEL_ELEMENTS = 9
# A backward pass computes a gradient for the input and one for the weights, each as costly as the forward.
BACKWARD_FORWARDS = 2


@dataclass(frozen=True, slots=True)
class Convolution:
    """A 3 x 3 convolution that keeps height and width, with the in-place ReLU after it."""

    name: str
    inputs: int
    outputs: int
    side: int

    @property
    def output_elements(self) -> int:
        """The elements of the output map for one image."""
        return self.outputs * self.side * self.side

    @property
    def flop(self) -> int:
        """FLOP of the forward pass for one image: a multiplication and an addition per weight and output position."""
        return 2 * KERNEL_ELEMENTS * self.inputs * self.output_elements

    def forward_ns(self, batch: int, flop_per_s: float) -> int:
        return round(batch * self.flop / flop_per_s * 1e9)

    def backward_ns(self, batch: int, flop_per_s: float) -> int:
        return BACKWARD_FORWARDS * self.forward_ns(batch, flop_per_s)


def _convolutions() -> tuple[Convolution, ...]:
    found = []
    inputs = IMAGE_CHANNELS
    for block, (outputs, side, count) in enumerate(_BLOCKS, start=1):
        for number in range(1, count + 1):
            found.append(Convolution(f"conv{block}_{number}", inputs, outputs, side))
            inputs = outputs
    return tuple(found)


# Channels, side and number of convolutions of each block. A max pooling after each block halves the side.
_BLOCKS = ((64, 224, 2), (128, 112, 2), (256, 56, 3), (512, 28, 3), (512, 14, 3))
CONVOLUTIONS = _convolutions()
# Indices in CONVOLUTIONS after which a pooling follows.
POOLED_AFTER = (1, 3, 6, 9, 12)
