"""Clips and unscales gradients that are away, slice by slice, with the bits of plain PyTorch.

[Note: What clipping would write is noted] Norms of gradients are computed from copies on the device, slice by slice,
in torch's order. Clipping changes each gradient by numbers that are known then. So the change is noted, and torch's own
function runs on the gradient when it is next on the device. Thus nothing is copied out again, and a pass that fails has
changed nothing.
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from vdnn.errors import VdnnError
from vdnn.runtime.torch_internals.clipping import Own, grouped, norms_of, takes_foreach
from vdnn.runtime.torch_internals.gradient_reads import holder_of
from vdnn.runtime.torch_internals.local_shards import is_sharded
from vdnn.runtime.training_state.away_gradients import AwayGradients
from vdnn.runtime.training_state.homes import device_of
from vdnn.runtime.training_state.interrupts import interrupts_wait
from vdnn.runtime.training_state.state_tensors import is_dense

Tensors = list[torch.Tensor]


@dataclass(slots=True)
class _GradientPart:
    """Parameters whose gradients come to the device together."""

    holder: AwayGradients
    parameters: Tensors = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    nbytes: int = 0


@dataclass(slots=True)
class _Optimizer:
    """As much of an optimizer as GradScaler looks at."""

    param_groups: list[dict[str, Tensors]]


def stand_ins(gradients: Tensors) -> Tensors:
    """Parameters that have `gradients`, for torch's functions."""
    found = []
    for gradient in gradients:
        one = gradient.detach()
        one.grad = gradient
        found.append(one)
    return found


def _holder(parameter: torch.Tensor) -> AwayGradients | None:
    """Who holds the gradient of `parameter`; None if it is on the device, or there is none."""
    holder = holder_of(parameter)
    return holder if isinstance(holder, AwayGradients) and holder.has(parameter) else None


def _like(device: torch.device, gradient: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=gradient.dtype, device=device)


def _divided(parameters: Tensors) -> tuple[Tensors, Tensors] | None:
    """The parameters whose gradients are away, and the others. None if torch's own function has to see all of them:
    nothing is away, or some are of a kind for which torch decides otherwise."""
    away = [parameter for parameter in parameters if _holder(parameter) is not None]
    here = [parameter for parameter in parameters if _holder(parameter) is None]
    gradients = [one.grad for one in here if one.grad is not None]
    is_plain = all(map(_is_plain, gradients)) and not any(map(is_sharded, away))
    return (away, here) if away and is_plain else None


def _is_plain(gradient: torch.Tensor) -> bool:
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided and is_dense(gradient)


def _parts(parameters: Iterable[tuple[int, torch.Tensor]]) -> Iterator[_GradientPart]:
    """Divides parameters whose gradients are away, given with their positions."""
    part: _GradientPart | None = None
    device: torch.device | None = None
    for position, parameter in parameters:
        holder = _holder(parameter)
        if holder is None:
            continue
        where = device_of(parameter)
        nbytes, limit_bytes = holder.bytes_of(parameter), holder.copies.slice_bytes(where)
        if part is None or part.holder is not holder or device != where or part.nbytes + nbytes > limit_bytes:
            if part is not None:
                yield part
            part, device = _GradientPart(holder), where
        part.parameters.append(parameter)
        part.positions.append(position)
        part.nbytes += nbytes
    if part is not None:
        yield part


def _copies_on_device(parameters: Iterable[tuple[int, torch.Tensor]]) -> Iterator[tuple[list[int], Tensors]]:
    """The positions and copies of gradients that are away, one slice after another, the next one on its way."""
    parts, ahead = list(_parts(parameters)), deque[Any]()
    try:
        for number, part in enumerate(parts):
            while number + len(ahead) < min(number + 2, len(parts)):
                following = parts[number + len(ahead)]
                try:
                    ahead.append((following.holder, following.holder.fetch(following.parameters)))
                except torch.OutOfMemoryError:
                    if not ahead:
                        raise
                    break  # there is room once this slice has left
            moving = ahead[0][1]
            part.holder.arrive(part.parameters, moving)
            yield part.positions, moving.tensors  # empty once they are dropped
            ahead.popleft()
            part.holder.copies.drop(moving)
    finally:
        with contextlib.suppress(VdnnError):  # the device is lost, which the first error says
            for holder, moving in ahead:
                holder.abandon(moving)


class GradientPasses:
    """The functions that run in place of torch's while gradients may be away."""

    def clip_norm(
        self,
        own: Own,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        listed = _listed(parameters)
        divided = _divided(listed)
        if divided is None:
            given = parameters if isinstance(parameters, torch.Tensor) else _as_given(parameters, listed)
            return own(given, max_norm, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        max_norm, norm_type = float(max_norm), float(norm_type)
        total = _total_norm(listed, norm_type, foreach)
        if error_if_nonfinite and not bool(total.isfinite()):
            torch.nn.utils.get_total_norm([total], norm_type, error_if_nonfinite=True)  # raises torch's own error
        _scale(*divided, max_norm, total, foreach)
        return total

    def clip_with_norm(
        self, own: Own, parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
    ) -> None:
        listed = _listed(parameters)
        divided = _divided(listed)
        if divided is None:
            own(listed, max_norm, total_norm, foreach)
        else:
            _scale(*divided, max_norm, total_norm, foreach)

    def clip_value(self, own: Own, parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
        listed = _listed(parameters)
        divided = _divided(listed)
        if divided is None:
            own(listed, clip_value, foreach)
        else:
            _write(*divided, torch.nn.utils.clip_grad_value_, float(clip_value), foreach)

    def unscale(
        self, own: Own, scaler: Any, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        def check(parameters: Tensors) -> dict[torch.device, torch.Tensor]:
            whole = _Optimizer([{"params": parameters}])
            return own(scaler, whole, inv_scale, found_inf, allow_fp16)  # type: ignore[no-any-return]

        listed = [one for group in optimizer.param_groups for one in group["params"]]
        divided = _divided(listed)
        if divided is None:
            return check(listed)
        away, here = divided
        found: dict[torch.device, torch.Tensor] = {}

        def add(checked: dict[torch.device, torch.Tensor]) -> None:
            for device, flag in checked.items():
                found[device] = torch.maximum(found[device], flag) if device in found else flag

        for _, gradients in _copies_on_device(enumerate(away)):
            add(check(stand_ins(gradients)))
        with interrupts_wait():
            add(check(here))
            _note(away, lambda gradients: check(stand_ins(gradients)))
        return found


def _listed(parameters: Any) -> Tensors:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _as_given(parameters: Any, listed: Tensors) -> Any:
    """torch warns of an empty generator, which is used up by now."""
    return (one for one in listed) if isinstance(parameters, types.GeneratorType) else listed


def _total_norm(parameters: Tensors, order: float, foreach: bool | None) -> torch.Tensor:
    """As torch computes it: norms of gradients by group, and the norm of these."""
    with_gradient: Tensors = []
    likes: Tensors = []
    for parameter in parameters:
        holder = _holder(parameter)
        gradient = parameter.grad if holder is None else holder.peek(parameter)
        if gradient is not None:
            with_gradient.append(parameter)
            likes.append(_like(device_of(parameter), gradient))
    norms: Tensors = []
    for device, positions in grouped(likes):
        is_foreach = takes_foreach([likes[one] for one in positions], device, foreach)
        group = [(position, with_gradient[position]) for position in positions]
        found: dict[int, torch.Tensor] = {}
        for of, gradients in _copies_on_device(group):
            found.update(zip(of, norms_of(gradients, order, foreach=is_foreach), strict=True))
        here = [(one, parameter) for one, parameter in group if _holder(parameter) is None]
        rest = [(one, gradient) for one, parameter in here if (gradient := parameter.grad) is not None]
        if rest:
            computed = norms_of((gradient for _, gradient in rest), order, foreach=is_foreach)
            found.update(zip((one for one, _ in rest), computed, strict=True))
        norms += [found[position] for position in positions]
    first = likes[0].device
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]), order)
    return total


def _scale(away: Tensors, here: Tensors, max_norm: float, total: torch.Tensor, foreach: bool | None) -> None:
    # A copy: the program may change the norm that it gets.
    _write(away, here, torch.nn.utils.clip_grads_with_norm_, max_norm, total.clone(), foreach)


def _write(away: Tensors, here: Tensors, clip: Callable[..., object], *options: Any) -> None:
    """Clips the gradients on the device, and notes the factor for gradients on the host."""

    def change(gradients: Tensors) -> object:
        return clip(stand_ins(gradients), *options)

    gradients = [(device_of(parameter), gradient) for parameter in away if (gradient := _peeked(parameter)) is not None]
    change([*{(device, one.dtype): _like(device, one) for device, one in gradients}.values()])  # refused now, if at all
    with interrupts_wait():
        if any(one.grad is not None for one in here):  # torch clips no empty list by value
            clip(here, *options)
        _note(away, change)


def _peeked(parameter: torch.Tensor) -> torch.Tensor | None:
    holder = _holder(parameter)
    return None if holder is None else holder.peek(parameter)


def _note(away: Tensors, change: Callable[[Tensors], object]) -> None:
    for parameter in away:
        holder = _holder(parameter)
        if holder is not None:
            holder.note(parameter, change)
