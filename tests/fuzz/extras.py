"""Other computations of a step: tensors that are not plain ones, forwards without gradients, unused branches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call, jacfwd, jvp, vmap

from tests.fuzz.grammar import operation, statement
from tests.fuzz.program import Statement
from tests.fuzz.shapes import fitted

if TYPE_CHECKING:
    from tests.fuzz.world import World

Tensor = torch.Tensor
Run = Callable[[], None]

# grad, vjp, jacrev and hessian are missing: torch refuses them while hooks on saved tensors are active.
TRANSFORMS = ("jvp", "jacfwd", "vmap", "vmap_no_grad", "dual")


@statement("transform", lambda random: (random.choice(TRANSFORMS),))
def _transform(world: World, one: Statement) -> Run:
    (how,) = one.args
    model = world.module(nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)))
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    stacked = {name: torch.stack([one.detach(), one.detach() * 2]) for name, one in parameters.items()}

    def of_model(x: Tensor) -> Tensor:
        made: Tensor = functional_call(model, parameters, (x,))
        return made.tanh()

    def each(own: dict[str, Tensor], x: Tensor) -> Tensor:
        made: Tensor = functional_call(model, own, (x,))
        return made

    def run() -> None:
        x = fitted(world.value(one.ins[0])).detach()
        world.note("transform", _transformed(how, of_model, each, stacked, x))

    return run


def _transformed(how: str, of_model: Any, each: Any, stacked: Any, x: Tensor) -> Tensor:
    if how == "jvp":
        return jvp(of_model, (x,), (torch.ones_like(x),))[1].detach()
    if how == "jacfwd":
        slope: Tensor = jacfwd(of_model)(x[0])
        return slope.detach()
    if how == "dual":
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            return torch.autograd.forward_ad.unpack_dual(of_model(dual)).tangent.detach()
    with torch.set_grad_enabled(how != "vmap_no_grad"):
        mapped: Tensor = vmap(each, (0, None))(stacked, x)
    return mapped.detach()


@operation("ensemble", weight=0.15)
def _ensemble(world: World) -> Callable[[Tensor], Tensor]:
    """Runs vmap over stacked parameters; their gradients are used outside of it."""
    weights = world.parameter(2, 8, 8)

    def applied(x: Tensor) -> Tensor:
        both: Tensor = vmap(lambda weight, y: torch.tanh(y @ weight), (0, None))(weights, fitted(x))
        return both[0] * both[1]

    return applied


@operation("nested", weight=0.15, draw=lambda random: (random.choice(["strided", "jagged"]),))
def _nested(world: World, layout: str) -> Callable[[Tensor], Tensor]:
    weight = world.parameter(8, 8)
    chosen = torch.strided if layout == "strided" else torch.jagged

    def applied(x: Tensor) -> Tensor:
        x = fitted(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=chosen)
            made = torch.nested.to_padded_tensor(torch.relu(nn.functional.linear(nested, weight)), 0.0)
        return made.reshape(-1, 8)[:4] + x

    return applied


@operation("sparse", weight=0.1)
def _sparse(world: World) -> Callable[[Tensor], Tensor]:
    matrix = torch.eye(4).mul_(0.5).to_sparse()
    return lambda x: torch.sparse.mm(matrix, fitted(x))


@operation("complex", weight=0.2)
def _complex(world: World) -> Callable[[Tensor], Tensor]:
    def applied(x: Tensor) -> Tensor:
        turned = torch.complex(fitted(x)[:, :4], fitted(x)[:, 4:]) * 1j
        return torch.view_as_real(turned.conj().tanh())[..., 0]

    return applied


@statement("traced")
def _traced(world: World, one: Statement) -> Run:
    """Traces a gradient with make_fx."""
    from torch.fx.experimental.proxy_tensor import make_fx

    weight = world.parameter(8, 8)

    def slope(x: Tensor) -> Tensor:
        found = torch.autograd.grad((torch.tanh(x @ weight) * x).sum(), weight)
        return found[0]

    def run() -> None:
        x = fitted(world.value(one.ins[0])).detach()
        world.note("traced", make_fx(slope)(x)(x).detach())

    return run


@statement("dead_branch", lambda random: (random.random() < 0.5,))
def _dead_branch(world: World, one: Statement) -> Run:
    """A branch that is saved and never used in a backward. In half of the programs it lives as long as the step."""

    def run() -> None:
        branch = (world.value(one.ins[0]).exp() * 0.1).sigmoid().square()
        if one.args[0]:
            world.held.append(branch)

    return run


@statement("evaluation")
def _evaluation(world: World, one: Statement) -> Run:
    weight = world.parameter(8, 8)

    def run() -> None:
        with torch.no_grad():
            world.note("evaluation", nn.functional.gelu(fitted(world.value(one.ins[0])) @ weight))

    return run
