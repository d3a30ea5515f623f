"""Programs that use parameters between calls of modules, beside tensors of the device.

Parameters that are away are on the host there, and a GPU mixes no tensors of both. Tensors of the CPU alone cannot show
that.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import vdnn
from deferred import DeferredAccelerator, Mode
from vdnn.runtime.training_state.parameters.away_parameter import away_of

WIDTH = 48
Program = Callable[[nn.Module, list[torch.Tensor]], None]  # behind each step, with earlier weights on the device


def average(model: nn.Module, earlier: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for one, parameter in zip(earlier, model.parameters(), strict=True):
            one.lerp_(parameter, 0.1)


def average_of_data(model: nn.Module, earlier: list[torch.Tensor]) -> None:
    for one, parameter in zip(earlier, model.parameters(), strict=True):
        one.mul_(0.9).add_(parameter.data, alpha=0.1)


def average_of_detached(model: nn.Module, earlier: list[torch.Tensor]) -> None:
    for one, parameter in zip(earlier, model.parameters(), strict=True):
        one.mul_(0.9).add_(parameter.detach(), alpha=0.1)


def average_at_once(model: nn.Module, earlier: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(earlier, list(model.parameters()), 0.1)


def perturbed(model: nn.Module, earlier: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, one in zip(model.parameters(), earlier, strict=True):
            parameter.add_(one, alpha=1e-3)


def moved_by_operators(model: nn.Module, earlier: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, one in zip(model.parameters(), earlier, strict=True):
            parameter -= 1e-3 * one
            parameter[:1] = one[:1]


def moved_at_once(model: nn.Module, earlier: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), earlier, alpha=1e-3)


def written_through_data(model: nn.Module, earlier: list[torch.Tensor]) -> None:
    for parameter, one in zip(model.parameters(), earlier, strict=True):
        parameter.data.add_(one, alpha=1e-3)


def distance(model: nn.Module, earlier: list[torch.Tensor]) -> None:
    with torch.no_grad():
        far = sum((parameter - one).square().sum() for parameter, one in zip(model.parameters(), earlier, strict=True))
        earlier[0].add_(far * 1e-3)


def held(model: nn.Module, earlier: list[torch.Tensor]) -> None:
    """The tensors outlive the next step, and show it."""
    earlier[:] = [parameter.detach() for parameter in model.parameters()]


def saved_and_averaged(model: nn.Module, earlier: list[torch.Tensor]) -> None:
    saved = copy.deepcopy(model.state_dict())
    average(model, earlier)
    model.load_state_dict({name: value * 0.99 for name, value in saved.items()})


def perturbed_while_a_dict_is_held(model: nn.Module, earlier: list[torch.Tensor]) -> None:
    saved = model.state_dict()
    perturbed(model, earlier)
    model.load_state_dict({name: value.clone() for name, value in saved.items()})


def averaged_and_set_from_the_host(model: nn.Module, earlier: list[torch.Tensor]) -> None:
    """The average reads weights that are then written to with numbers of the host."""
    values = [parameter.detach().cpu() * 0.9 for parameter in model.parameters()]
    average(model, earlier)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def of_several_weights(model: nn.Module, earlier: list[torch.Tensor]) -> None:
    """Functions of several weights, of which some are on the device by then."""
    weights = list(model.parameters())
    with torch.no_grad():
        size = weights[0].norm()
        between = (weights[0] - weights[2]).norm()
        whole = torch.cat([one.flatten() for one in weights]).norm()
        biases = torch.cat([weights[1], weights[3]]).sum()
        earlier[0].add_((size + between + whole + biases) * 1e-3)


def of_several_weights_while_one_is_held(model: nn.Module, earlier: list[torch.Tensor]) -> None:
    """One is on the device as another one is used, whose memory of the host is held."""
    weights = list(model.parameters())
    with torch.no_grad():
        weights[1].norm()  # the others leave
        held = model.state_dict()["2.weight"]
        size = weights[0].norm().cpu()
        between = (weights[0] - weights[2]).norm().cpu()
        earlier[0].add_(float((size + between) * 1e-3))
    del held


PROGRAMS = (
    *(average, average_of_data, average_of_detached, average_at_once, perturbed, moved_by_operators, moved_at_once),
    *(written_through_data, distance, held, saved_and_averaged, perturbed_while_a_dict_is_held),
    *(averaged_and_set_from_the_host, of_several_weights, of_several_weights_while_one_is_held),
)


def sharpness_aware(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """A step that perturbs the weights between two backwards."""
    model(x).square().mean().backward()
    with torch.no_grad():
        perturbations = [one.grad / (one.grad.norm() + 1e-6) * 1e-2 for one in model.parameters()]
        for parameter, one in zip(model.parameters(), perturbations, strict=True):
            parameter.add_(one)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    with torch.no_grad():
        for parameter, one in zip(model.parameters(), perturbations, strict=True):
            parameter.sub_(one)
    optimizer.step()


def decayed_in_hooks(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Gradients that hooks change, by the weights themselves and by their data."""

    def decayed(parameter: torch.Tensor) -> Any:
        return lambda gradient: gradient + 0.01 * parameter.detach()

    @torch.no_grad()
    def decay(parameter: torch.Tensor) -> None:
        parameter.grad.add_(parameter, alpha=0.01)  # type: ignore[union-attr]

    handles = [one.register_hook(decayed(one)) for one in model.parameters()]
    handles += [one.register_post_accumulate_grad_hook(decay) for one in model.parameters()]
    simple(model, optimizer, x)
    for handle in handles:
        handle.remove()


def stepped_in_hooks(model: nn.Module, _: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Steps each weight as soon as its gradient is there."""

    @torch.no_grad()
    def step(parameter: torch.Tensor) -> None:
        parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    handles = [one.register_post_accumulate_grad_hook(step) for one in model.parameters()]
    model(x).square().mean().backward()
    for handle in handles:
        handle.remove()


def on_the_devices_of_weights(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Asks weights for the device of a batch, and for that of noise that is added to them."""
    batch = x.cpu()
    simple(model, optimizer, batch.to(next(model.parameters()).device))
    with torch.no_grad():
        for one in model.parameters():
            assert not one.is_cpu
            assert one.get_device() == 0
            one.add_(torch.full(one.shape, 1e-3, device=one.device))
            assert one.device.type == "deferred"  # also behind a write, and behind a copy
            copy.deepcopy(one)
            assert one.device.type == "deferred"


def reparametrized(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Makes other parameters of the memory of weights, the first time, and trains them."""
    assert isinstance(model, nn.Sequential)
    if not parametrize.is_parametrized(model[0]):
        parametrizations.weight_norm(model[0])
        parametrizations.orthogonal(model[2])
        bias = model[2].bias
        assert isinstance(bias, nn.Parameter)
        model[2].bias = nn.Parameter(bias)
        assert isinstance(model[2].bias, nn.Parameter)
        assert model[2].bias.data_ptr() == bias.data_ptr()
        optimizer.param_groups[0]["params"] = list(model.parameters())
    simple(model, optimizer, x)


def simple(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()


def with_gradients_of_two_losses(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Combines the gradients of tasks by hand, as gradient surgery does."""
    y, weights = model(x), list(model.parameters())
    first = torch.autograd.grad(y.square().mean(), weights, retain_graph=True)
    second = torch.autograd.grad(y.abs().mean(), weights)
    for parameter, one, other in zip(weights, first, second, strict=True):
        parameter.grad = one + other
    optimizer.step()


class Reader(nn.Module):
    """Reads the weight of another layer besides its own."""

    def __init__(self, own: nn.Linear, other: nn.Linear) -> None:
        super().__init__()
        self.own, self._other = own, [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.own(x), self._other[0].weight)


class Checkpointed(nn.Sequential):
    """Computes each layer again in the backward."""

    def __init__(self, use_reentrant: bool, has_reader: bool) -> None:
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        super().__init__(first, nn.Tanh(), Reader(last, first) if has_reader else last)
        self._use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=self._use_reentrant)
        return x


def found(
    program: Program | None,
    mode: Mode,
    parameters: str | None,
    step: Any = simple,
    *,
    frozen: bool = False,
    on: str | None = None,
    use_reentrant: bool | None = None,
) -> list[torch.Tensor]:
    """Parameters and earlier weights after four steps. `use_reentrant`: with checkpoints of this kind, if given."""
    torch.manual_seed(0)
    with DeferredAccelerator(mode, capacity="64MiB") as accelerator, contextlib.ExitStack() as sessions:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        if use_reentrant is not None:
            model = Checkpointed(use_reentrant, has_reader=program is not None)
        model.to("deferred")
        model[0].requires_grad_(not frozen)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        earlier = [one.detach() * 0.9 for one in model.parameters()]
        if parameters is not None or on is not None:
            options: dict[str, Any] = {"model": model, "optimizer": optimizer, "parameters": parameters}
            if on is not None:
                options["optimizer_on"] = on
            sessions.enter_context(vdnn.offload("vdnn-all", device=accelerator, min_bytes=0, **options))
        managed = list(model.parameters()) if parameters == "all" else []
        for number in range(4):
            torch.manual_seed(number)
            step(model, optimizer, torch.randn(4, WIDTH).to("deferred"))
            optimizer.zero_grad()
            if program is not None:
                program(model, earlier)
        assert step is reparametrized or all(away_of(one) is not None for one in managed)
        return [one.detach().cpu().clone() for one in (*model.parameters(), *earlier)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_mixes_parameters_with_tensors_of_the_device(program: Program, mode: Mode) -> None:
    assert all(map(torch.equal, found(program, mode, "all"), found(program, mode, None)))


@pytest.mark.parametrize("program", [average, average_of_data, distance], ids=lambda program: program.__name__)
def test_it_mixes_frozen_parameters(program: Program) -> None:
    expected = found(program, Mode.RANDOM, None, frozen=True)
    assert all(map(torch.equal, found(program, Mode.RANDOM, "frozen", frozen=True), expected))


def test_gradients_are_assigned_to_parameters_that_the_cpu_steps(mode: Mode) -> None:
    expected = found(None, mode, None, with_gradients_of_two_losses, on="cpu")
    ours = found(None, mode, "all", with_gradients_of_two_losses, on="cpu")
    assert all(map(torch.equal, ours, expected))


STEPS = [
    *(sharpness_aware, decayed_in_hooks, stepped_in_hooks, on_the_devices_of_weights, with_gradients_of_two_losses),
    reparametrized,
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_it_uses_weights_between_backwards_and_in_hooks(step: Any, mode: Mode) -> None:
    expected = found(None, mode, None, step)
    assert all(map(torch.equal, found(None, mode, "all", step), expected))


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not_reentrant", "reentrant"])
@pytest.mark.parametrize("program", [average, perturbed, distance], ids=lambda program: program.__name__)
def test_it_mixes_parameters_behind_checkpoints(program: Program, mode: Mode, *, use_reentrant: bool) -> None:
    step = on_the_devices_of_weights
    expected = found(program, mode, None, step, use_reentrant=use_reentrant)
    assert all(map(torch.equal, found(program, mode, "all", step, use_reentrant=use_reentrant), expected))


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not_reentrant", "reentrant"])
@pytest.mark.parametrize("step", [sharpness_aware, decayed_in_hooks, stepped_in_hooks], ids=lambda step: step.__name__)
def test_it_uses_weights_in_hooks_between_checkpoints(step: Any, mode: Mode, *, use_reentrant: bool) -> None:
    expected = found(None, mode, None, step, use_reentrant=use_reentrant)
    assert all(map(torch.equal, found(None, mode, "all", step, use_reentrant=use_reentrant), expected))
