"""Norm modules whose forward does not match their attributes: gradients are those of plain torch in every mode.

The values of the first steps hide a wrong constant; those of later steps do not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.runtime.unusual.every_mode import MODES, Step, assert_same_in
from tests.runtime.unusual.small_networks import steps_on

pytestmark = pytest.mark.slow

Tensor = torch.Tensor
_FEATURES = 24
_ROWS = 256
_COINCIDENT = 5  # the number of steps in which two constants give one result; recipes are proven in these steps


class OtherEps(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, 1e-3)


class EpsByKeyword(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return torch.layer_norm(input, self.normalized_shape, eps=1e-2, weight=self.weight)


class EpsOfAnotherName(nn.LayerNorm):
    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.epsilon = 1e-3

    def forward(self, input: Tensor) -> Tensor:
        return torch.native_layer_norm(input, [input.shape[-1]], self.weight, self.bias, self.epsilon)[0]


class EpsThatIsSetBack(nn.LayerNorm):
    """Changes its attribute back as soon as the call ends."""

    def forward(self, input: Tensor) -> Tensor:
        self.eps = 1e-3
        made = super().forward(input)
        self.eps = 1e-5
        return made


class TwoEps(nn.LayerNorm):
    """Calls the norm of its base class twice, the second time with another eps."""

    def forward(self, input: Tensor) -> Tensor:
        self.eps = 1e-3
        first = super().forward(input)
        self.eps = 1e-5
        return super().forward(first.sin()) + first


class NotOfTorch(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(features)), None, 1e-5

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-3)


class EpsThatGrows(nn.LayerNorm):
    """Uses another eps in every step."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, 1e-5 * self.calls)


class ScaledWeight(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight * 3, self.bias + 1, 1e-3)


class OtherRmsEps(nn.RMSNorm):
    def forward(self, input: Tensor) -> Tensor:
        return functional.rms_norm(input, self.normalized_shape, self.weight, eps=1e-2)


class _Maps(nn.Module):
    """Reshapes the input for a norm of maps."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, input: Tensor) -> Tensor:
        made: Tensor = self.norm(input.view(-1, 4, 3, 2))
        return made.view(input.shape)


class ShiftedBatch(nn.BatchNorm2d):
    """Shifts by a buffer, which has no gradient."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(4, affine=False)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, input: Tensor) -> Tensor:
        made = functional.batch_norm(input, None, None, None, self.shift, True)
        self.calls += 1
        self.shift = self.shift + (0.25 if self.calls >= _COINCIDENT else 0.0)
        return made


class ShiftedBatchByKeyword(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        shift = input.detach().mean((0, 2, 3)).floor() * 0.5  # zero at first
        return functional.batch_norm(input, weight=None, bias=shift, running_mean=None, running_var=None, training=True)


class ShiftedGroup(nn.GroupNorm):
    calls = 0

    def __init__(self) -> None:
        super().__init__(2, 4, affine=False)

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return torch.group_norm(input, 2, None, torch.full((4,), 1.0 if self.calls > _COINCIDENT else 0.0), 1e-5)


class ShiftedInstance(nn.InstanceNorm2d):
    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        shift = torch.linspace(0, 1, 4) * float(self.calls > _COINCIDENT)
        return functional.instance_norm(input, None, None, None, shift, True, 0.1, 1e-2)


class ShiftedOnlyLater(nn.BatchNorm2d):
    """Shifts by zeros in the steps in which recipes are proven."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        shift = torch.full((4,), 1.0 if self.calls > _COINCIDENT else 0.0)
        return functional.batch_norm(input, None, None, None, shift, True)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer norm with another eps": lambda: OtherEps(_FEATURES),
    "layer norm with eps by keyword": lambda: EpsByKeyword(_FEATURES),
    "layer norm with eps of another name": lambda: EpsOfAnotherName(_FEATURES),
    "layer norm whose eps is set back": lambda: EpsThatIsSetBack(_FEATURES),
    "layer norm that is called twice": lambda: TwoEps(_FEATURES),
    "layer norm of a class that is not torch's": lambda: NotOfTorch(_FEATURES),
    "layer norm with an eps that grows": lambda: EpsThatGrows(_FEATURES),
    "layer norm with a scaled weight": lambda: ScaledWeight(_FEATURES),
    "RMS norm with another eps": lambda: OtherRmsEps(_FEATURES),
    "batch norm that shifts by a buffer": lambda: _Maps(ShiftedBatch()),
    "batch norm that shifts by what it reads": lambda: _Maps(ShiftedBatchByKeyword(4, affine=False)),
    "batch norm that shifts later": lambda: _Maps(ShiftedOnlyLater(4, affine=False)),
    "group norm that shifts by a constant": lambda: _Maps(ShiftedGroup()),
    "instance norm that shifts by a constant": lambda: _Maps(ShiftedInstance(4)),
}


def _program(make: Callable[[], nn.Module]) -> Callable[[], Step]:
    """Norms whose outputs are saved, with a product between two norms. There are many rows and few weights, so that the
    plan has to decide on saves. In the first steps the inputs are so large that float32 hides any eps."""

    def factory() -> Step:
        norms = [make() for _ in range(4)]
        gates = [nn.Linear(_FEATURES, _FEATURES) for _ in norms]
        inputs = torch.randn(_ROWS, _FEATURES)

        def loss_of(index: int) -> Tensor:
            held = inputs.roll(index) * (1e4 if index < _COINCIDENT else 1e-2)
            made = held
            for norm, gate in zip(norms, gates, strict=True):
                made = functional.gelu(norm(held * gate(made).sigmoid()))
            return made.square().mean()

        return steps_on(loss_of, *gates, *norms, lr=0.01)

    return factory


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_are_those_of_plain_torch(norm: str, mode: str) -> None:
    assert_same_in(mode, _program(NORMS[norm]), steps=12)
