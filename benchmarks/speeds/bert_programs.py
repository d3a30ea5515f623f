"""How NVIDIA's BERT programs train, where that differs from torch's own ways (DeepLearningExamples, PyTorch).

run_squad.py in float32 steps with its BertAdam, operation by operation for each parameter. In float16 it has apex's
amp at level O2: the model is in float16, with copies of its parameters in float32 that apex's FusedAdam updates.
Pre-training uses torch's autocast. Attention adds a mask to its scores in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from benchmarks.models.bert import Attention, Layer

_BETAS = (0.9, 0.999)
_EPSILON = 1e-6
_DECAY = 0.01
_RATE = 3e-5


class _MaskedAttention(Attention):
    """Attention whose scores get the mask of padding, which the published program makes once a step."""

    def __init__(self, width: int, mask: Tensor) -> None:
        super().__init__(width)
        self.register_buffer("mask", mask)

    def masked(self, scores: Tensor) -> Tensor:
        return scores + self.get_buffer("mask").to(scores.dtype)


def add_mask(model: nn.Module, batch: int, tokens: int) -> None:
    """Replaces the attention of all layers by one that adds a mask of (batch, 1, 1, tokens)."""
    mask = torch.zeros(batch, 1, 1, tokens)
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.attention = _MaskedAttention(layer.attention.query.in_features, mask)


class BertAdam:
    """Adam as run_squad.py has it for float32: about twelve kernels for each parameter, none of them fused."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters: list[Tensor] = list(parameters)
        self._moments: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def step(self) -> None:
        used = [one for one in self._parameters if one.grad is not None]
        _clip([one.grad for one in used if one.grad is not None])
        self._moments = self._moments or [(torch.zeros_like(one), torch.zeros_like(one)) for one in used]
        torch._foreach_norm(used)
        for parameter, (mean, square) in zip(used, self._moments, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            # The program scales a copy of the parameter by the norm, which nothing reads.
            parameter * 1.0 / 1.0
            mean.mul_(_BETAS[0]).add_(gradient, alpha=1 - _BETAS[0])
            square.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
            update = mean / (square.sqrt() + _EPSILON)
            if parameter.dim() > 1:  # biases and norms do not decay
                update += _DECAY * parameter
            parameter.add_(-(_RATE * update))


class ApexO2:
    """FusedAdam on copies in float32 of parameters in float16, as apex's amp steps at level O2."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._masters = [one.detach().float() for one in self._parameters]
        self._gradients = [torch.empty_like(one) for one in self._masters]
        self._means, self._squares = ([torch.zeros_like(one) for one in self._masters] for _ in range(2))
        self._steps = [torch.zeros(()) for _ in self._masters]

    @torch.no_grad()
    def step(self) -> None:
        used = [place for place, one in enumerate(self._parameters) if one.grad is not None]
        parameters, masters, gradients, means, squares, steps = (
            [found[place] for place in used]
            for found in (self._parameters, self._masters, self._gradients, self._means, self._squares, self._steps)
        )
        torch._foreach_copy_(gradients, [one.grad for one in parameters if one.grad is not None])
        _clip(gradients)
        torch._fused_adamw_(
            *(masters, gradients, means, squares, [], steps),
            lr=_RATE,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            weight_decay=_DECAY,
            eps=_EPSILON,
            amsgrad=False,
            maximize=False,
        )
        torch._foreach_copy_([one.detach() for one in parameters], masters)


def _clip(gradients: list[Tensor]) -> None:
    """As GradientClipper: a norm of all, and one kernel that scales them."""
    torch._foreach_norm(gradients)
    torch._foreach_mul_(gradients, 1.0)
