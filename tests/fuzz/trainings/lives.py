"""Events in the life of a model around its steps: freezing, evaluation, saving and loading, copies and averages."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.fuzz.program import Statement
from tests.fuzz.trainings.grammar import statement

if TYPE_CHECKING:
    from tests.fuzz.trainings.world import Run, Training

Tensor = torch.Tensor


@statement("freeze", lambda random: (random.randrange(2), random.randrange(8), random.random() < 0.5), 1)
def _freeze(world: Training, one: Statement) -> Run:
    """Freezes a block of a net, or thaws it."""
    part, number, is_frozen = one.args

    def run() -> None:
        net: Any = world.net(part)
        blocks = [] if net is None else list(net.blocks)
        if not blocks:
            return
        for parameter in blocks[number % len(blocks)].parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(not is_frozen)

    return run


@statement("evaluate", lambda random: (random.choice(["no_grad", "inference", "train mode"]), random.randrange(2)), 1)
def _evaluate(world: Training, one: Statement) -> Run:
    how, part = one.args

    def run() -> None:
        net = world.net(part)
        if net is None:
            return
        net.train(how == "train mode")
        try:
            with torch.inference_mode() if how == "inference" else torch.no_grad():
                world.note("evaluation", net(world.batch()).clone())
        finally:
            net.train()

    return run


_SAVES = ("reference", "deepcopy", "file")


@statement("save", lambda random: (random.choice(_SAVES), random.randrange(2)), 1)
def _save(world: Training, one: Statement) -> Run:
    how, part = one.args

    def run() -> None:
        net, optimizer = world.net(part), world.optimizer(part)
        if net is None:
            return
        found: Any = {"net": net.state_dict(), "optimizer": None if optimizer is None else optimizer.state_dict()}
        if how == "deepcopy":
            found = copy.deepcopy(found)
        elif how == "file":
            saved = io.BytesIO()
            torch.save(found, saved)
            saved.seek(0)
            found = torch.load(saved)
        world.saved = [(how, part, found)]

    return run


@statement("load", lambda random: (random.choice(["both", "net", "optimizer", "assign", "swap"]),), 1)
def _load(world: Training, one: Statement) -> Run:
    """Loads what was saved. A reference that was kept is not loaded: its tensors are those of the training."""
    (what,) = one.args

    def run() -> None:
        if not world.saved or world.saved[0][0] == "reference":
            return
        _, part, found = world.saved[0]
        net, optimizer = world.net(part), world.optimizer(part)
        if net is not None and what != "optimizer":
            if what == "swap":  # refused by torch while a graph holds a parameter
                world.values.clear()
                world.losses.clear()
            torch.__future__.set_swap_module_params_on_conversion(what == "swap")
            try:
                net.load_state_dict(copy.deepcopy(found["net"]), strict=False, assign=what == "assign")
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)
        if optimizer is not None and found["optimizer"] is not None and what in ("both", "optimizer"):
            groups = found["optimizer"]["param_groups"]
            if [len(one["params"]) for one in groups] == [len(one["params"]) for one in optimizer.param_groups]:
                optimizer.load_state_dict(copy.deepcopy(found["optimizer"]))

    return run


@statement("copy_net", lambda random: (random.randrange(2), random.random() < 0.5), 0.7)
def _copy_net(world: Training, one: Statement) -> Run:
    """Copies a net, and runs the copy, also backward."""
    part, has_backward = one.args

    def run() -> None:
        net = world.net(part)
        if net is None:
            return
        made = copy.deepcopy(net)
        loss = made(world.batch()).square().mean()
        world.note("loss of a copy", loss)
        if has_backward and loss.requires_grad:
            loss.backward()
            for index, parameter in enumerate(made.parameters()):
                world.note(f"gradient of a copy {index}", parameter.grad)

    return run


@statement("average", lambda random: (random.randrange(2), random.choice(["ema", "swa", "buffers"])), 0.8)
def _average(world: Training, one: Statement) -> Run:
    """Makes an average of a net at its first run, and updates it at the following ones."""
    part, how = one.args

    def run() -> None:
        net = world.net(part)
        if net is None:
            return
        average = world.copies.get(("average", part))
        if average is None:
            given = {} if how == "swa" else {"multi_avg_fn": get_ema_multi_avg_fn(0.8)}
            world.copies["average", part] = AveragedModel(net, use_buffers=how == "buffers", **given)
            return
        average.update_parameters(net)
        for index, parameter in enumerate(average.parameters()):
            world.note(f"average {index}", parameter)

    return run
