"""Optimizers and schedulers of trainings, and what happens to their groups."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.fuzz.program import Statement
from tests.fuzz.trainings.grammar import statement
from tests.runtime.training_state.loops import SignOfMomentum

if TYPE_CHECKING:
    from tests.fuzz.trainings.world import Run, Training

Make = Callable[..., torch.optim.Optimizer]
_O = torch.optim
_KINDS: dict[str, Make] = {
    "sgd": lambda given, **form: _O.SGD(given, lr=0.05, **form),
    "momentum": lambda given, **form: _O.SGD(given, lr=0.05, momentum=0.9, nesterov=True, **form),
    "adamw": lambda given, **form: _O.AdamW(given, lr=1e-2, **form),
    "amsgrad": lambda given, **form: _O.Adam(given, lr=1e-2, amsgrad=True, **form),
    "adam decayed": lambda given, **form: _O.Adam(given, lr=1e-2, weight_decay=0.1, **form),
    "adagrad": lambda given, **form: _O.Adagrad(given, lr=1e-2, **form),
    "rmsprop": lambda given, **form: _O.RMSprop(given, lr=1e-3, momentum=0.9, centered=True, **form),
    "nadam": lambda given, **form: _O.NAdam(given, lr=1e-2, **form),
    "adafactor": lambda given, **form: _O.Adafactor(given, lr=1e-2, **form),
    "radam": lambda given, **form: _O.RAdam(given, lr=1e-2, **form),
    "adadelta": lambda given, **form: _O.Adadelta(given, lr=0.5, **form),
    "rprop": lambda given, **form: _O.Rprop(given, lr=1e-2, **form),
    "asgd": lambda given, **form: _O.ASGD(given, lr=1e-2, **form),
    "muon": lambda given: _O.Muon(given, lr=1e-2),
    "third party": lambda given: SignOfMomentum(given, lr=1e-2),
}
_FUSED = ("sgd", "momentum", "adamw", "amsgrad", "adam decayed", "adagrad")  # those with a fused kernel for the CPU
_FORMS = ("loop", "foreach", "fused", "tensor lr")
GROUPS = ("one", "two", "each", "later")


def draw_optimizer(random: Random) -> tuple[Any, ...]:
    kind = random.choice([*_KINDS, "adamw", "adamw", "momentum", "momentum", "sgd", "amsgrad"])
    return kind, random.choice(_FORMS), random.choice(["one", "one", *GROUPS])


def _form(kind: str, form: str, steps_on_cpu: bool) -> dict[str, Any]:
    if kind in ("muon", "third party"):
        return {}
    if kind in _FUSED and (form == "fused" or steps_on_cpu):
        return {"fused": True}  # a step on the CPU takes the fused form, so plain takes it as well
    if kind == "adafactor":
        return {"foreach": form == "foreach"}
    return {"foreach": form in ("foreach", "fused")}


@statement("optimizer")
def _optimizer(world: Training, one: Statement) -> Run:
    """Makes the optimizer of a net, if it has parameters that need gradients."""
    part, kind, form, groups = one.args

    def run() -> None:
        if part not in world.nets:
            return
        given = [one for one in world.nets[part].parameters() if one.is_floating_point()]
        if groups != "one":  # with those that are frozen, as much code passes them
            given = [one for one in given if one.requires_grad]
        if kind == "muon":
            given = [one for one in given if one.dim() == 2]
        if not given:
            return
        options = _form(kind, form, world.steps_on_cpu)
        made = _KINDS[kind](_groups(given, groups), **options)
        if form == "tensor lr" and kind in ("adamw", "amsgrad", "adam decayed"):
            for group in made.param_groups:
                group["lr"] = torch.tensor(group["lr"])
        world.optimizers[part] = made

    return run


_IN_HOOKS = 100  # from this number on, optimizers have one parameter each


@statement("optimizers_in_hooks", lambda random: (random.choice(["sgd", "momentum", "adamw"]), random.random() < 0.6))
def _optimizers_in_hooks(world: Training, one: Statement) -> Run:
    """One optimizer for each parameter, which steps as soon as that gradient is accumulated."""
    kind, forgets = one.args

    def run() -> None:
        for index, parameter in enumerate(world.parameters(0)):
            if parameter.requires_grad:
                made = _KINDS[kind]([parameter], **_form(kind, "loop", world.steps_on_cpu))
                world.optimizers[_IN_HOOKS + index] = made
                world.hooks.append(parameter.register_post_accumulate_grad_hook(_stepper(made, forgets)))

    return run


def _stepper(optimizer: torch.optim.Optimizer, forgets: bool) -> Callable[[torch.Tensor], None]:
    def step(parameter: torch.Tensor) -> None:
        optimizer.step()
        if forgets:
            optimizer.zero_grad()

    return step


def _groups(given: list[nn.Parameter], groups: str) -> Any:
    if groups == "one" or len(given) < 3:
        return given
    if groups == "each":
        return [{"params": [one]} for one in given]
    half = len(given) // 2
    first = [{"params": given[:half]}]
    return first if groups == "later" else [*first, {"params": given[half:], "lr": 0.02}]


def draw_group(random: Random) -> tuple[Any, ...]:
    how = random.choice(["out", "out", "in", "in", "add", "move", "lr", "empty", "copy"])
    return how, random.randrange(2), random.randrange(3)


@statement("group", draw_group, 1.5)
def _group(world: Training, one: Statement) -> Run:
    """Takes a group out of an optimizer, puts it back, adds one, moves a parameter, or changes options."""
    how, part, number = one.args

    def run() -> None:
        optimizer = world.optimizer(part)
        if optimizer is not None:
            _changed(world, optimizer, how, part, number)

    return run


def _changed(world: Training, optimizer: torch.optim.Optimizer, how: str, part: int, number: int) -> None:
    groups, out = optimizer.param_groups, world.groups_out.setdefault(part, [])
    group = groups[number % len(groups)]
    if how == "out" and len(groups) > 1:
        out.append(groups.pop(number % len(groups)))
    elif how == "in" and out:
        groups.append(out.pop(0))
    elif how == "add":
        known = {id(one) for group in [*groups, *out] for one in group["params"]}
        missing = [one for one in world.parameters(part) if id(one) not in known and one.is_floating_point()]
        if isinstance(optimizer, torch.optim.Muon):
            missing = [one for one in missing if one.dim() == 2]
        if missing:
            optimizer.add_param_group({"params": missing, "lr": 0.003})
    elif how == "move" and len(groups) > 1 and len(group["params"]) > 1:
        groups[(number + 1) % len(groups)]["params"].append(group["params"].pop())
    elif how == "lr" and not isinstance(group["lr"], torch.Tensor):
        group["lr"] *= 0.7
    elif how == "empty" and len(group["params"]) > 1:
        world.copies["emptied", part] = group["params"].pop()
    elif how == "copy" and ("emptied", part) in world.copies:
        group["params"].append(world.copies.pop(("emptied", part)))


_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: _O.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: _O.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "lambda": lambda optimizer: _O.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


@statement("scheduler", lambda random: (random.randrange(2), random.choice([*_SCHEDULERS])), 0.3)
def _scheduler(world: Training, one: Statement) -> Run:
    part, kind = one.args

    def run() -> None:
        optimizer = world.optimizer(part)
        if optimizer is not None and part not in world.schedulers:
            world.schedulers[part] = _SCHEDULERS[kind](optimizer)

    return run


@statement("schedule", lambda random: (random.randrange(2),), 0.3)
def _schedule(world: Training, one: Statement) -> Run:
    def run() -> None:
        scheduler = world.schedulers.get(one.args[0])
        if scheduler is not None and len(scheduler.base_lrs) == len(scheduler.optimizer.param_groups):
            scheduler.step()

    return run
