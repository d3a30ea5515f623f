"""Parameters that leave the device between calls of modules, and gradients that torch then loses track of.

torch begins another sum of a parameter's gradient when its data are put on another device, and asks only the newest one
for a gradient. No tensor of the CPU shows that, because its data never change their device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn

import vdnn
from deferred import DeferredAccelerator, Mode
from vdnn.runtime.training_state import cpu_steps

WIDTH = 48


class Often(nn.Module):
    """Uses one weight four times in a call, so its gradient is a sum of four."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _, last = self.weight.chunk(3)
        x = (x @ first.t()).tanh() @ self.weight[WIDTH : 2 * WIDTH].t()
        return nn.functional.layer_norm(torch.sigmoid(x) @ last.t(), (WIDTH,), self.weight.view(-1)[:WIDTH])


class Summed(nn.Module):
    """Adds the sum of a parameter, whose gradient is one element that is expanded. torch copies it."""

    def __init__(self) -> None:
        super().__init__()
        self.cube = nn.Parameter(torch.randn(3, 4, WIDTH) * 0.1)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x) + self.cube.sum((0, 1))  # type: ignore[no-any-return]


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class _Adjoint(torch.autograd.Function):
    """Calls a module again in its backward, and names the parameters as it saved them in the forward pass."""

    @staticmethod
    def forward(ctx: Any, call: nn.Module, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return call(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            out = ctx.call(again)
        return None, *torch.autograd.grad(out, [again, *parameters], gradient, allow_unused=True)


class Solved(nn.Module):
    """A layer that is differentiated by an adjoint, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.solved, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _Adjoint.apply(self.solved, self.first(x).tanh(), *self.solved.parameters())
        return self.last(x)


def called_once(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def called_twice(model: nn.Module, x: torch.Tensor) -> None:
    (model(x).square().mean() + model(x + 1).square().mean()).backward()


def accumulated_and_scaled(model: nn.Module, x: torch.Tensor) -> None:
    called_once(model, x)
    called_once(model, x + 1)
    for one in model.parameters():
        assert one.grad is not None
        one.grad.mul_(torch.full((), 0.5).to("deferred"))
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def read_between_calls(model: nn.Module, x: torch.Tensor) -> None:
    penalty = next(model.parameters())
    (model(x).square().mean() + 0.01 * penalty[::2].pow(2).sum()).backward()


def named_in_backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward(inputs=list(model.parameters()))


def some_named_in_backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward(inputs=[next(model.parameters())])


def asked_of_grad(model: nn.Module, x: torch.Tensor) -> None:
    parameters = list(model.parameters())
    loss = model(x).square().mean() + model(x + 1).square().mean() + model(x + 2).square().mean()
    for one, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        one.grad = gradient


def asked_of_grad_with_a_graph(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(one.square().sum() for one in gradients)).backward()


def accumulated_with_a_graph(model: nn.Module, x: torch.Tensor) -> None:
    """As for a penalty on the gradients of parameters, or an estimate of curvature."""
    model(x).square().mean().backward(create_graph=True)
    penalty = sum(one.grad.square().sum() for one in model.parameters() if one.grad is not None)
    assert isinstance(penalty, torch.Tensor)
    assert {one.device.type for node in nodes_of(penalty) for one in node._input_metadata} == {"deferred"}
    model.zero_grad()
    penalty.backward()


def nodes_of(outcome: torch.Tensor) -> set[Any]:
    found: set[Any] = set()
    waiting: list[Any] = [outcome.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return found


PROGRAMS: list[tuple[Callable[[], nn.Module], Callable[[nn.Module, torch.Tensor], None]]] = [
    (Often, called_twice),
    (Often, read_between_calls),
    (Solved, called_once),
    (Summed, accumulated_and_scaled),
    *(
        (layers, program)
        for program in (
            *(named_in_backward, some_named_in_backward, asked_of_grad, asked_of_grad_with_a_graph),
            accumulated_with_a_graph,
        )
    ),
]


# Registers hooks that note what they see, and returns what has to live as long as they do.
Register = Callable[[nn.Module, list[str]], object]


def gradients_of(
    make: Callable[[], nn.Module],
    program: Callable[[nn.Module, torch.Tensor], None],
    mode: Mode,
    *,
    managed: bool,
    watch: tuple[Register, list[str]] | None = None,
    optimizer_on: str = "device",
    sets_to_none: bool = True,
) -> list[torch.Tensor | None]:
    """Those of three steps, and the parameters behind them."""
    torch.manual_seed(0)
    found: list[torch.Tensor | None] = []
    with DeferredAccelerator(mode, capacity="64MiB") as accelerator, contextlib.ExitStack() as sessions:
        model = make().to("deferred")
        held = None if watch is None else watch[0](model, watch[1])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if managed:
            options = {"model": model, "optimizer": optimizer, "parameters": "all", "optimizer_on": optimizer_on}
            session = vdnn.offload("vdnn-all", device=accelerator, min_bytes=0, **options)  # type: ignore[arg-type]
            sessions.enter_context(contextlib.closing(session))
            sessions.enter_context(session)
        for _ in range(3):
            program(model, torch.randn(16, WIDTH).to("deferred"))
            found += [None if one.grad is None else one.grad.cpu() for one in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=sets_to_none)
        found += [one.detach().cpu() for one in model.parameters()]
        del held
        sessions.close()
        accelerator.synchronize()
    return found


@pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph=True")
@pytest.mark.parametrize(("make", "program"), PROGRAMS, ids=lambda one: one.__name__)
def test_gradients_have_the_bits_of_parameters_that_stay(
    make: Callable[[], nn.Module], program: Callable[[nn.Module, torch.Tensor], None], mode: Mode
) -> None:
    expected, found = (gradients_of(make, program, mode, managed=one) for one in (False, True))
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert (one is None) is (other is None)
        assert one is None or other is None or torch.equal(one, other)


@pytest.mark.parametrize("optimizer_on", ["device", "cpu"])
@pytest.mark.parametrize("sets_to_none", [False, True])
def test_a_gradient_that_torch_copies_is_on_the_device(
    optimizer_on: str, sets_to_none: bool, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_steps, "_FUSED_ON_THE_CPU", ())  # which has other bits
    expected, found = (
        gradients_of(
            Summed,
            accumulated_and_scaled,
            mode,
            managed=one,
            optimizer_on=optimizer_on,
            sets_to_none=sets_to_none,
        )
        for one in (False, True)
    )
    for one, other in zip(expected, found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def halved_at_the_node(model: nn.Module, seen: list[str]) -> object:
    nodes = [torch.autograd.graph.get_gradient_edge(one).node for one in model.parameters()]
    for node in nodes:
        node.register_prehook(lambda gradients: (gradients[0] * 0.5,))
    return nodes


def counted_at_the_node(model: nn.Module, seen: list[str]) -> object:
    nodes: list[Any] = [one.expand_as(one).grad_fn.next_functions[0][0] for one in model.parameters()]  # type: ignore[union-attr]
    for node in nodes:
        node.register_hook(lambda *_: seen.append("accumulated"))
    return nodes


def heard_together(model: nn.Module, seen: list[str]) -> object:
    def heard(gradients: object) -> None:
        seen.append("all are there")

    return torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), heard)


@pytest.mark.parametrize("register", [halved_at_the_node, counted_at_the_node, heard_together])
def test_a_hook_on_the_node_of_a_gradient_keeps_its_parameter_on_the_device(register: Register, mode: Mode) -> None:
    """As programs have them that reduce or scale gradients by themselves: torch's new nodes would have none."""
    seen: dict[bool, list[str]] = {False: [], True: []}
    found = [gradients_of(layers, called_twice, mode, managed=one, watch=(register, seen[one])) for one in seen]
    assert seen[True] == seen[False]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True) if one is not None)


class CalledTwice(nn.Module):
    """Calls its first layer twice, which its parameters do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = self.first(self.second(self.first(x).tanh()).tanh())
        return again


def stepped_in_hooks(
    parameters: Literal["all"] | None, *, is_called_before: bool
) -> tuple[list[str], list[torch.Tensor]]:
    """The names of the parameters in the order in which their hooks stepped them, and the parameters afterwards."""
    torch.manual_seed(0)
    called: list[str] = []
    with DeferredAccelerator(Mode.RANDOM, capacity="64MiB") as accelerator, contextlib.ExitStack() as sessions:
        model = CalledTwice().to("deferred")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if parameters is not None:
            session = vdnn.offload(
                "vdnn-all", device=accelerator, min_bytes=0, model=model, optimizer=optimizer, parameters=parameters
            )
            sessions.enter_context(session)

        @torch.no_grad()
        def step(name: str, parameter: torch.Tensor) -> None:
            called.append(name)
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda one, name=name: step(name, one))
        batches = [torch.randn(4, WIDTH).to("deferred") for _ in range(3)]
        if is_called_before:
            model(batches[0])
        for batch in batches:
            model(batch).square().mean().backward()
        return called, [one.detach().cpu().clone() for one in model.parameters()]


def test_hooks_of_a_layer_that_is_called_twice_are_said_to_run_for_each_part_in_the_first_step() -> None:
    expected, _ = stepped_in_hooks(None, is_called_before=False)
    with pytest.warns(vdnn.VdnnWarning, match="is called for each part of it in this step") as warnings:
        found, _ = stepped_in_hooks("all", is_called_before=False)
    assert len(warnings) == 1
    assert len(found) == len(expected) + 2
    assert found[-2 * len(expected) // 3 :] == expected[-2 * len(expected) // 3 :], (
        "later steps are as in plain PyTorch"
    )


def test_a_call_before_the_first_step_shows_what_is_called_twice(recwarn: pytest.WarningsRecorder) -> None:
    expected, values = stepped_in_hooks(None, is_called_before=True)
    found, ours = stepped_in_hooks("all", is_called_before=True)
    assert found == expected
    assert all(map(torch.equal, ours, values))
    assert not [one for one in recwarn if "each part" in str(one.message)]
