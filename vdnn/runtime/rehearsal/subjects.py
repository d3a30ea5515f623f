"""Subjects: a module with a batch, or a function of a batch size that makes both, as people bring them.

A function may return a model with its inputs (a tensor, a tuple, a dict, a dataclass, or a loader, whose first batch is
taken), with a loss, with an optimizer, or an object whose `step()` is the user's whole training step. Models may be
made in the function or before it, on the CPU, on the meta device, or "on" a GPU that is not there.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from vdnn.runtime.rehearsal.user_code import user_code
from vdnn.runtime.torch_internals.fake_modules import materialize

_RETURNS = "(model, inputs), (model, inputs, optimizer), (model, inputs, loss), or an object with `model` and `step()`"
LossOf = Callable[[Any], torch.Tensor]


class Staged(NamedTuple):
    """A model without data, a function that runs one step, and the inputs that exist before the first step. With an
    `optimizer`, the rehearsal calls its step. `program` is the user's object, whose step() may do that itself;
    otherwise `compute_loss` is the step without its backward pass."""

    model: torch.nn.Module
    step: Callable[[], object]
    inputs: object = None
    optimizer: torch.optim.Optimizer | None = None
    program: object = None
    compute_loss: Callable[[], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """The model and inputs to rehearse. `make` is called under a FakeTensorMode, so that its tensors have no data."""

    make: Callable[[], Staged]


def subject_of(model: object, batch: object, loss: LossOf | None = None) -> Subject:
    """The subject for a function of a batch size, or for a module and its inputs.

    The function returns (model, inputs), (model, inputs, loss), (model, inputs, optimizer), (model, inputs, optimizer,
    loss), or an object with `model` and `step()`. The loss is a function of the model's output. The default is the
    output's `loss`, or else the sum of the squares of its first tensor that requires grad.
    """
    if isinstance(model, torch.nn.Module):
        return Subject(lambda: _stage((model, batch), loss))
    if not callable(model):
        raise TypeError(f"plan: expected a module or a function of a batch size, got {type(model).__name__}.")
    if type(batch) is not int or batch < 1:
        raise ValueError(f"batch: expected a number, 1 or more, got {batch!r}.")
    return Subject(lambda: _stage(_made(model, batch), loss))


def _made(make: Callable[[int], Any], batch: int) -> Any:
    with user_code(f"calling {getattr(make, '__name__', 'the function')}({batch})", function=make):
        return make(batch)


def _stage(returned: Any, loss: LossOf | None) -> Staged:
    if isinstance(returned, torch.nn.Module):
        raise TypeError(
            f"plan: the function returned a model, a {type(returned).__name__}, without its inputs. Return {_RETURNS}."
        )
    if hasattr(returned, "step") and isinstance(getattr(returned, "model", None), torch.nn.Module):
        return _stage_program(returned)
    parts = tuple(returned) if isinstance(returned, (tuple, list)) else ()
    if len(parts) not in (2, 3, 4) or not isinstance(parts[0], torch.nn.Module):
        raise TypeError(f"plan: the function must return {_RETURNS}, but it returned {_described(returned)}.")
    optimizer = next((one for one in parts[2:] if isinstance(one, torch.optim.Optimizer)), None)
    losses = [one for one in parts[2:] if one is not optimizer and one is not None]
    if len(losses) > 1 or not all(callable(one) for one in losses):
        raise TypeError(
            f"plan: the function must return {_RETURNS}, where the loss is a function of the model's output, but it "
            f"returned {_described(returned)}."
        )
    (model, optimizer), inputs = _without_data((parts[0], optimizer)), _inputs(parts[1])
    compute_loss = _loss_of_step(model, inputs, losses[0] if losses else loss)

    def step() -> None:
        value = compute_loss()
        with user_code("running the backward pass"):
            torch.autograd.backward(value)

    return Staged(model, step, inputs, optimizer, compute_loss=compute_loss)


def _stage_program(program: Any) -> Staged:
    """An object with a step of its own, which may hold an optimizer, a scaler, a scheduler and averaged weights."""
    if not callable(program.step):
        raise TypeError(f"plan: `step` must be a method, got {type(program.step).__name__}.")
    program = _without_data(program)

    def step() -> object:
        with user_code("running step()"):
            return program.step()

    return Staged(program.model, step, program=program)


def _loss_of_step(model: torch.nn.Module, inputs: Any, loss: LossOf | None) -> Callable[[], torch.Tensor]:
    def compute_loss() -> torch.Tensor:
        with user_code("calling the model"):
            output = _call_model(model, inputs)
        if loss is None:
            value = loss_of(output)
        else:
            with user_code("computing the loss"):
                value = loss(output)
        _check_loss(value)
        return value

    return compute_loss


def _check_loss(loss: object) -> None:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"plan: the loss must be a tensor of one number, but it is {_described(loss)}.")
    if loss.numel() != 1:
        raise ValueError(
            f"plan: the loss must be a tensor of one number, but its shape is {list(loss.shape)}. Take its mean or its "
            "sum."
        )
    if not loss.requires_grad:
        raise ValueError(
            "plan: the loss does not require grad, so there is no backward pass to plan. The model may have no "
            "parameter that requires grad, or its forward may run under torch.no_grad() or detach its output."
        )


def _call_model(model: torch.nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def loss_of(output: Any) -> torch.Tensor:
    """The output's `loss` if it has one, or else the sum of the squares of its first tensor that requires grad."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = [one for one in _leaves(output) if isinstance(one, torch.Tensor)]
    if not tensors:
        raise TypeError(
            f"plan: expected the model to return a tensor or an output with `loss`, got {_described(output)}. Pass "
            "loss=, a function of the output."
        )
    chosen = next((one for one in tensors if one.requires_grad), tensors[0])
    return chosen.float().square().sum()


def _leaves(value: Any) -> Iterator[Any]:
    """Tensors in order, also those in dataclasses and in dicts of classes that torch does not know."""
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _inputs(inputs: Any) -> Any:
    """The inputs without data; for a loader, those of its first batch."""
    known = (torch.Tensor, tuple, list, Mapping)
    if not isinstance(inputs, known) and not dataclasses.is_dataclass(inputs) and hasattr(inputs, "__iter__"):
        with user_code("taking the first batch of the loader"):
            inputs = _first_batch(inputs)
        if inputs is None:
            raise ValueError("plan: expected a loader with a batch at least, got an empty one.")
    if not any(isinstance(one, torch.Tensor) for one in _leaves(inputs)):
        raise TypeError(f"plan: expected inputs with a tensor, got {_described(inputs)}.")
    return _fields_without_data(inputs)


def _first_batch(loader: Any) -> Any:
    if not isinstance(loader, torch.utils.data.DataLoader):
        return next(iter(loader), None)
    if loader.num_workers:  # workers would inherit the modes of a rehearsal
        loader = copy.copy(loader)
        loader.num_workers, loader.timeout = 0, 0
    with _disable_current_modes():  # a sampler reads more indices than a rehearsal knows
        return next(iter(loader), None)


def _fields_without_data(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _fields_without_data(one) for name, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, _fields_without_data(getattr(value, field.name)))
        return made
    return tree_map_only(torch.Tensor, _tensor_without_data, value)


def _tensor_without_data(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "meta":
        return torch.empty_like(tensor, device="cpu")
    with contextlib.nullcontext() if isinstance(tensor, FakeTensor) else _disable_current_modes():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ValueError("plan: expected a batch of numbers, got NaN in it. Any numbers of that shape will do.")
    # The rehearsal's modes replace a real tensor by one without data, and keep the values of small ones.
    return tensor if isinstance(tensor, FakeTensor) else torch.ops.aten.alias.default(tensor)


def _without_data(held: Any) -> Any:
    """`held` itself if its model was made without data, or else a copy. The user's own modules are not changed."""
    models = [held[0]] if isinstance(held, tuple) else [held.model]
    if any(not isinstance(one, FakeTensor) for model in models for one in _tensors_of(model)):
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if not isinstance(mode, FakeTensorMode):
            raise RuntimeError("Subject.make: expected an active FakeTensorMode. Call it inside a VirtualMachine.")
        with user_code("copying the model, which was made with data"), unset_fake_temporarily(), FakeCopyMode(mode):
            held = copy.deepcopy(held)
        models = [held[0]] if isinstance(held, tuple) else [held.model]
    for model in models:
        if any(one.device.type == "meta" for one in _tensors_of(model)):
            materialize(model)
    return held


def _tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _described(value: object) -> str:
    if isinstance(value, (tuple, list)):
        kinds = ", ".join(type(one).__name__ for one in value)
        return f"a {type(value).__name__} of {len(value)} ({kinds})"
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def held_by(staged: Staged) -> list[Any]:
    """Modules and tensors besides the model that exist before the first step, for counting their memory."""
    if staged.program is None:
        held = [staged.inputs]
    else:
        held = [one for one in _attributes(staged.program) if one is not staged.model]
    held += [state for optimizer in optimizers_of(staged) for state in optimizer.state.values()]
    found = [one for value in held for one in _leaves(value)]
    return [one for one in found if isinstance(one, (torch.Tensor, torch.nn.Module))]


def optimizers_of(staged: Staged) -> list[torch.optim.Optimizer]:
    held = [staged.optimizer] if staged.program is None else list(_leaves(_attributes(staged.program)))
    return [one for one in held if isinstance(one, torch.optim.Optimizer)]


def _attributes(program: object) -> list[Any]:
    if isinstance(program, tuple):
        return list(program)
    return list(getattr(program, "__dict__", {}).values())
