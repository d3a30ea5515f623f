"""A step on the CPU, by choice: the state stays on the host, and only gradients and parameters cross the link.

    for each slice:  gradients and parameters -> host, the own step on the host, parameters -> device

The copies of the next slice to the host, and of the last one to the device, run on the copy streams while the own step
computes one, on torch's threads. Parameters on the device are copied to the host in each step: the program may have
changed them. Those that are on the host between their uses (`parameters="all"`) are stepped there, and not copied.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from vdnn.errors import VdnnError
from vdnn.runtime.training_state.homes import device_of
from vdnn.runtime.training_state.host_tensor import HostTensor, host_tensor_for
from vdnn.runtime.training_state.parameters.stepped_parameters import away_now
from vdnn.runtime.training_state.sliced_step import SlicedStep
from vdnn.runtime.training_state.slices import Group, Slice, parameters_of
from vdnn.runtime.training_state.state_copies import StateCopies, StateCopy
from vdnn.runtime.training_state.state_tensors import TensorPlace, is_held, is_whole, places_in

Optimizer = torch.optim.Optimizer
CopiesFor = Callable[[torch.device | None], StateCopies | None]


@dataclass(slots=True)
class OnHost:
    """The parameters of a slice that have a gradient, with their copies on the host."""

    parameters: list[torch.Tensor]
    values: list[torch.Tensor]
    gradients: list[torch.Tensor]
    moving: StateCopy  # copied by the copy streams: parameters, then gradients
    pinned: dict[int, int]  # by position of a parameter whose copy is in `moving`: its position there
    on_host: set[int]  # positions of parameters that are on the host, and are stepped there


class CpuSteps:
    """One step of an optimizer on the CPU. `hosts` are the host tensors of its state, by id of the tensor."""

    def __init__(
        self, optimizer: Optimizer, copies_for: CopiesFor, hosts: dict[int, HostTensor], min_bytes: int
    ) -> None:
        self._optimizer = optimizer
        self._copies_for = copies_for
        self._hosts = hosts
        self._min_bytes = min_bytes
        self.stayed_bytes = 0  # of new state, because no memory could be pinned
        self._stand_ins: dict[int, torch.nn.Parameter] = {}

    def sliced(self, own_step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> SlicedStep:
        """The step of which `own_step` is the unmodified function. Raises for what cannot be stepped on the CPU."""

        def on_host(*args: Any, **kwargs: Any) -> None:
            step_on_host(self._optimizer, own_step, self._stand_ins, args, kwargs)

        sliced = SlicedStep(self._optimizer, on_host, args, kwargs)  # evaluates a closure, which may make gradients
        self._refuse_sparse_gradients()
        return sliced

    def _refuse_sparse_gradients(self) -> None:
        for number, parameter in enumerate(parameters_of(self._optimizer)):
            gradient = parameter.grad
            if gradient is not None and gradient.layout is not torch.strided:
                name = type(self._optimizer).__name__
                raise VdnnError(
                    f"{name} cannot be stepped on the CPU: the gradient of parameter {number}, of shape "
                    f"{list(parameter.shape)}, is sparse. Use optimizer_on='device', or dense gradients."
                )

    def steps(self, sliced: SlicedStep, slices: list[Slice]) -> Iterator[Slice]:
        """Yields each slice before its parameters change. Everything is on the device at the end; blocks."""
        ahead: deque[OnHost | None] = deque()
        back: deque[tuple[StateCopies, StateCopy]] = deque()
        try:
            for number, part in enumerate(slices):
                while number + len(ahead) < min(number + 2, len(slices)):
                    ahead.append(self._bring(slices[number + len(ahead)]))
                yield part
                self._step_one(sliced, part, ahead.popleft(), back)
                while len(back) > 1:
                    _settle(back.popleft())
        finally:
            for brought in ahead:
                if brought is not None:
                    copies = self._copies_for(device_of(brought.parameters[0]))
                    if copies is not None:
                        copies.settle(brought.moving)
            while back:
                _settle(back.popleft())

    def _bring(self, part: Slice) -> OnHost | None:
        """Issues copies of the parameters and gradients of `part` to the host."""
        copies = self._copies_for(part.device)
        parameters = [one for one in part.all_parameters() if one.grad is not None]
        if copies is None or not parameters:
            return None
        tensors: list[torch.Tensor] = []
        hosts: list[HostTensor] = []
        values: list[torch.Tensor] = []
        pinned: dict[int, int] = {}

        def copy_of(tensor: torch.Tensor) -> torch.Tensor:
            host = _host_tensor(tensor, copies)
            if host is None:
                return tensor.to("cpu", copy=True)
            tensors.append(tensor)
            hosts.append(host)
            return host.tensor

        on_host: set[int] = set()
        for index, parameter in enumerate(parameters):
            before = len(tensors)
            away = away_now(parameter)
            if away is not None:
                copies.settle_uses(away.host)
                values.append(away.host.tensor)
                on_host.add(index)
                continue
            values.append(copy_of(parameter.detach()))
            if len(tensors) > before:
                pinned[index] = before
        gradients = [copy_of(one.grad.detach()) for one in parameters if one.grad is not None]
        return OnHost(parameters, values, gradients, copies.mirror(tensors, hosts), pinned, on_host)

    def _step_one(
        self, sliced: SlicedStep, part: Slice, brought: OnHost | None, back: deque[tuple[StateCopies, StateCopy]]
    ) -> None:
        copies = self._copies_for(part.device)
        if brought is None or copies is None:
            sliced.step(part)
            return
        copies.settle(brought.moving)
        every = zip(brought.parameters, brought.values, brought.gradients, strict=True)
        self._stand_ins = {id(one): stand_in_for(one, values, gradient) for one, values, gradient in every}
        stand_ins = list(self._stand_ins.values())
        gradients = [_GradientOnHost(one) for one in stand_ins]
        try:
            sliced.step(part)
        finally:
            self._stand_ins = {}
        for parameter, values, stand_in in zip(brought.parameters, brought.values, stand_ins, strict=True):
            self._take_replaced_data(parameter, values, stand_in)
        back.append((copies, copies.write_back(brought.moving, list(brought.pinned.values()))))
        scalars_move = self._parameters_with_scalars_on_the_device()
        # GradScaler gives the scale to fused optimizers, which divide the gradients by it. Else torch's fused kernels
        # write to no gradient, but count as if they had.
        is_scaled = vars(self._optimizer).get("grad_scale") is not None
        may_write = is_scaled or type(self._optimizer) not in _FUSED_ON_THE_CPU
        with torch.no_grad():
            for parameter, gradient in zip(brought.parameters, gradients if may_write else [], strict=may_write):
                if is_scaled or gradient.was_written:
                    gradient.give_to(parameter)
            for index, (parameter, values) in enumerate(zip(brought.parameters, brought.values, strict=True)):
                if index not in brought.pinned and index not in brought.on_host:
                    parameter.copy_(values)
                else:
                    increment_version(parameter)
                self._keep_state_of(parameter, copies, scalars_move=id(parameter) in scalars_move)

    def _take_replaced_data(self, parameter: torch.Tensor, values: torch.Tensor, stand_in: torch.nn.Parameter) -> None:
        """Copies the parameter's data to where they were, if the step has given it other data. The state may hold the
        former ones, which stay what they were."""
        is_in_place = stand_in.data_ptr() == values.data_ptr() and stand_in.stride() == values.stride()
        is_alike = (stand_in.shape, stand_in.dtype) == (values.shape, values.dtype)
        if is_in_place and is_alike:
            return
        if not is_alike:
            raise VdnnError(
                f"{type(self._optimizer).__name__} cannot be stepped on the CPU: it gives a parameter of "
                f"{values.dtype} and shape {list(values.shape)} data of {stand_in.dtype} and shape "
                f"{list(stand_in.shape)}. Use optimizer_on='device'."
            )
        former = values.untyped_storage().data_ptr()
        for place in places_in(self._optimizer.state.get(parameter)):
            if place.tensor.untyped_storage().data_ptr() == former:
                place.put(place.tensor.clone())
        values.copy_(stand_in.detach().clone())  # they may overlap

    def _parameters_with_scalars_on_the_device(self) -> set[int]:
        """The ids of the parameters whose count of steps torch keeps on the device."""
        groups = [group for group in self._optimizer.param_groups if group.get("fused") or group.get("capturable")]
        return {id(one) for group in groups for one in group["params"]}

    def _keep_state_of(self, parameter: torch.Tensor, copies: StateCopies, *, scalars_move: bool) -> None:
        """Pins the state that this step made. Small state, and state that cannot be pinned, is put where a step on the
        device puts it."""
        for place in list(places_in(self._optimizer.state.get(parameter))):  # a generator would hold what it yields
            if place.tensor.device.type != "cpu":
                continue
            if place.tensor.dim():
                host = self._hosts.get(id(place.tensor)) or self._pinned_copy(place, copies)
                place.put(place.tensor.to(device_of(parameter)) if host is None else host.tensor)
            elif scalars_move:
                place.put(place.tensor.to(device_of(parameter)))

    def _pinned_copy(self, place: TensorPlace, copies: StateCopies) -> HostTensor | None:
        """A host tensor with the bytes of new state. None if the tensor is small, if somebody else holds it, or if no
        memory can be pinned."""
        is_small = place.tensor.nbytes < self._min_bytes
        if is_small or not is_whole(place.tensor, torch.device("cpu")) or is_held(place):
            return None
        tensor = place.tensor
        try:
            host = host_tensor_for(tensor, copies.transport)
        except (VdnnError, MemoryError):
            self.stayed_bytes += tensor.nbytes
            return None
        copies.settle_uses(host)
        host.tensor.copy_(tensor)
        self._hosts[id(host.tensor)] = host
        return host


class _GradientOnHost:
    """The gradient of a stand-in before its step."""

    def __init__(self, stand_in: torch.nn.Parameter) -> None:
        self._stand_in, self._gradient = stand_in, stand_in.grad
        self._version = -1 if stand_in.grad is None else stand_in.grad._version

    @property
    def was_written(self) -> bool:
        now = self._stand_in.grad
        return now is not self._gradient or (now is not None and now._version != self._version)

    def give_to(self, parameter: torch.Tensor) -> None:
        """The parameter gets the gradient that the step has left."""
        now = self._stand_in.grad
        if now is None or parameter.grad is None:
            parameter.grad = None
        else:
            parameter.grad.copy_(now)


def _host_tensor(tensor: torch.Tensor, copies: StateCopies) -> HostTensor | None:
    """Pinned memory for a copy of `tensor`. None: torch has to copy it."""
    if not is_whole(tensor, copies.transport.torch_device):
        return None
    try:
        return host_tensor_for(tensor, copies.transport)
    except (VdnnError, MemoryError):
        return None


def _settle(written: tuple[StateCopies, StateCopy]) -> None:
    copies, moving = written
    copies.settle(moving)


# Runs an optimizer's own step on copies of its parameters and gradients on the host, where its state is.
#
# The own step sees groups with the copies, and the state of the device's parameters under them. torch's fused CPU
# kernels run where torch has them and they take the dtypes: on torch's threads, in one pass over memory. Otherwise the
# own step takes the form that it would take on the device: NAdam, RAdam and ASGD round differently in their two forms.

_FOREACH_BY_DEFAULT = (  # on a GPU
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.SGD),
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop),
)
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
        is_fused = all(group.get("fused") for group in optimizer.param_groups)
        if not is_fused and not _could_unscale(optimizer, list(stand_ins.values())):
            return
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


def _could_unscale(optimizer: torch.optim.Optimizer, stand_ins: list[torch.nn.Parameter]) -> bool:
    """Does what the fused kernel that GradScaler counts on would do, where the own step has none: divides gradients by
    the scale, which the step no longer sees. False: they are not finite, so no step is made."""
    attributes = vars(optimizer)
    scale, found_inf = (attributes.get(name) for name in _OF_SCALER)
    attributes.update((name, None) for name in _OF_SCALER if name in attributes)
    if found_inf is not None and found_inf.item():
        return False
    if scale is not None:
        for gradient in [one.grad for one in stand_ins if one.grad is not None]:
            gradient.div_(scale)
    return True


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
    elif _is_foreach_by_default(optimizer, group):
        replaced.update(foreach=True)
    before = {name: group[name] for name in replaced}
    group.update(replaced)
    try:
        yield
    finally:
        group.update(before)


def _is_foreach_by_default(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """True if torch chooses the form for all parameters at once where they are, and the program has not chosen."""
    if type(optimizer) not in _FOREACH_BY_DEFAULT or group.get("foreach", False) is not None:
        return False
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and isinstance(group["lr"], torch.Tensor):
        return False  # torch takes the for-loop then
    known = _get_foreach_kernels_supported_devices()
    return all(device_of(one).type in known for one in group["params"])


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
    lent: list[tuple[TensorPlace, torch.Tensor]] = []
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
