"""Runs an optimizer's own step on copies of its parameters and gradients on the host, where its state is.

The own step sees groups with the copies, and the state of the device's parameters under them. torch's fused CPU kernels
run where torch has them and they take the dtypes: on torch's threads, in one pass over memory. Otherwise the own step
runs in the form that the optimizer was made with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vdnn.runtime.training_state.slices import Group, parameters_of
from vdnn.runtime.training_state.state_tensors import Place, places_in

_FUSED_ON_THE_CPU = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
# The fused SGD of torch 2.13 leaves bf16 and fp16 parameters on the CPU as they are, but for the last few elements.
_WIDE = (torch.float32, torch.float64)
_FLOATING = (*_WIDE, torch.bfloat16, torch.float16)
_OF_SCALER = ("grad_scale", "found_inf")  # GradScaler gives them to fused optimizers as attributes
_CPU = torch.device("cpu")


def stand_in_for(parameter: torch.Tensor, values: torch.Tensor, gradient: torch.Tensor) -> torch.nn.Parameter:
    """A parameter on the host. Its gradient has its dtype and strides, which the fused kernels take for granted."""
    made = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
    if gradient.layout is torch.strided and (gradient.dtype, gradient.stride()) != (made.dtype, made.stride()):
        gradient = torch.empty_like(made, requires_grad=False).copy_(gradient)
    made.grad = gradient
    return made


def step_on_host(
    optimizer: torch.optim.Optimizer,
    own_step: Callable[..., Any],
    stand_ins: dict[int, torch.nn.Parameter],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Steps `stand_ins`, by id of the device's parameter. The groups, the state and the attributes of `optimizer` are
    those of the device again afterwards, whatever happens."""
    parameters = list(parameters_of(optimizer))
    pairs = [(one, stand_ins[id(one)]) for one in parameters if id(one) in stand_ins]
    with contextlib.ExitStack() as restored:
        restored.enter_context(_attributes_on_host(optimizer))
        for group in optimizer.param_groups:
            restored.enter_context(_group_on_host(optimizer, group, stand_ins))
        for parameter, stand_in in reversed(pairs):  # they are left in order: new states come in that of the groups
            restored.enter_context(_state_on_host(optimizer, parameter, stand_in))
        own_step(*args, **kwargs)


@contextlib.contextmanager
def _attributes_on_host(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    attributes = vars(optimizer)
    before = dict(attributes)
    for name in _OF_SCALER:
        if isinstance(attributes.get(name), torch.Tensor):
            attributes[name] = attributes[name].to(_CPU)
    try:
        yield
    finally:
        for name in _OF_SCALER:
            if name in before:
                attributes[name] = before[name]
        if "_need_device_dtype_check_for_fused" not in before:
            attributes.pop("_need_device_dtype_check_for_fused", None)


@contextlib.contextmanager
def _group_on_host(
    optimizer: torch.optim.Optimizer, group: Group, stand_ins: dict[int, torch.nn.Parameter]
) -> Iterator[None]:
    parameters = group["params"]
    on_host = [stand_ins.get(id(one), one) for one in parameters]
    replaced: Group = {"params": on_host}
    for name, value in group.items():
        if isinstance(value, torch.Tensor) and value.device != _CPU:
            replaced[name] = value.to(_CPU)
    if group.get("capturable"):
        replaced["capturable"] = False  # for CUDA graphs, and refused for tensors on the CPU
    if _has_fused_kernel(optimizer, on_host):
        replaced.update(fused=True, foreach=False)
    elif group.get("fused"):
        replaced.update(fused=False)
    before = {name: group[name] for name in replaced}
    group.update(replaced)
    try:
        yield
    finally:
        group.update(before)


def _has_fused_kernel(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> bool:
    if type(optimizer) not in _FUSED_ON_THE_CPU:
        return False
    taken = _WIDE if type(optimizer) is torch.optim.SGD else _FLOATING
    gradients = [(one, one.grad) for one in parameters if one.grad is not None]
    return all(one.dtype in taken and gradient.layout is torch.strided for one, gradient in gradients)


@contextlib.contextmanager
def _state_on_host(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, stand_in: torch.nn.Parameter
) -> Iterator[None]:
    """The state of `parameter` under `stand_in`, with host copies of the scalars and small tensors on the device."""
    state = optimizer.state.get(parameter, {})
    lent: list[tuple[Place, torch.Tensor]] = []
    for place in places_in(state):
        if place.tensor.device != _CPU:
            copy = place.tensor.to(_CPU)
            lent.append((place, copy))
            place.put(copy)
    optimizer.state[stand_in] = state
    try:
        yield
    finally:
        for place, copy in lent:
            if place.container[place.key] is copy:
                place.tensor.copy_(copy)
                place.put(place.tensor)
        del optimizer.state[stand_in]
        if state:
            optimizer.state[parameter] = state
