"""The statements of a step: forwards, losses, backwards, clipping, steps of optimizers, and what goes wrong in them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.fuzz.program import INPUT, Statement
from tests.fuzz.trainings.grammar import BLOCKS, statement
from tests.fuzz.trainings.world import PlannedError

if TYPE_CHECKING:
    from tests.fuzz.trainings.world import Clock, Run, Training

Tensor = torch.Tensor


class Net(nn.Module):
    """The blocks of a statement, one behind the other. The forward raises behind one of them if the clock says so."""

    def __init__(self, clock: Clock, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.clock = nn.ModuleList(blocks), clock

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.clock.raises_behind == index:
                raise PlannedError("in a forward")
        return x


@statement("net")
def _net(world: Training, one: Statement) -> Run:
    (part,) = one.args

    def run() -> None:
        world.nets[part] = Net(world.clock, [BLOCKS[each.name].build(world.clock, *each.args) for each in one.body])

    return run


@statement("teacher")
def _teacher(world: Training, one: Statement) -> Run:
    """A frozen copy of the first net, which follows it by `follow`."""

    def run() -> None:
        if 0 in world.nets:
            world.nets[1] = copy.deepcopy(world.nets[0]).requires_grad_(False)

    return run


@statement("follow", lambda random: (random.choice(["lerp", "foreach", "data", "buffers", "state_dict"]),))
def _follow(world: Training, one: Statement) -> Run:
    (how,) = one.args

    @torch.no_grad()
    def run() -> None:
        if len(world.nets) < 2:
            return
        student, teacher = world.nets[0], world.nets[1]
        if how == "state_dict":
            found, own = student.state_dict(), teacher.state_dict()
            teacher.load_state_dict(
                {name: one * 0.8 + found[name] * 0.2 if one.is_floating_point() else one for name, one in own.items()}
            )
            return
        pairs = [
            (to, source)
            for to, source in zip(teacher.parameters(), student.parameters(), strict=True)
            if to.is_floating_point()
        ]
        if how == "foreach" and pairs:
            torch._foreach_lerp_([to for to, _ in pairs], [source for _, source in pairs], 0.2)
            return
        for to, source in pairs:
            if how == "data":
                to.data.mul_(0.8).add_(source.data, alpha=0.2)
            else:
                to.lerp_(source, 0.2)
        if how == "buffers":
            for buffer, newer in zip(teacher.buffers(), student.buffers(), strict=True):
                buffer.copy_(newer)

    return run


@statement("loop")
def _loop(world: Training, one: Statement) -> Run:
    runs = [world.compiled(inner) for inner in one.body]
    return lambda: world.loop(one.args[0], runs)


FORWARDS = ("plain", "plain", "plain", "plain", "plain", "thread", "autocast")


def draw_forward(random: Random) -> tuple[Any, ...]:
    return (random.choice(FORWARDS),)


def _on_a_thread(run: Callable[[], Any]) -> Any:
    """Runs it on another thread, where grad mode and hooks on saved tensors begin afresh."""
    found: list[Any] = []

    def caught() -> None:
        try:
            found.append((run(), None))
        except Exception as error:
            found.append((None, error))

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    ((value, error),) = found
    if error is not None:
        raise error
    return value


@statement("forward")
def _forward(world: Training, one: Statement) -> Run:
    """Calls a net on the batch or on another net's output."""
    part, how = one.args

    def run() -> None:
        net = world.nets.get(part)
        if net is None:
            return
        (slot,) = one.ins
        x = world.batch() if slot == INPUT else world.values.get(slot, world.batch())
        if how == "detached":
            x = x.detach()
        if how == "no_grad":
            with torch.no_grad():
                world.values[one.out] = net(x)
        elif how == "thread":
            world.values[one.out] = _on_a_thread(lambda: net(x))
        elif how == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                world.values[one.out] = net(x).float()
        else:
            world.values[one.out] = net(x)

    return run


LOSSES = ("square", "mean", "log", "cross_entropy")


@statement("loss", lambda random: (random.choice(LOSSES), random.choice([1.0, 1.0, 0.5, 8.0])))
def _loss(world: Training, one: Statement) -> Run:
    kind, scale = one.args

    def run() -> None:
        found = [world.values[slot] for slot in one.ins if slot in world.values]
        if not found:
            return
        x = found[0] if len(found) == 1 else found[0] - found[1]
        if kind == "square":
            loss = x.square().mean()
        elif kind == "mean":
            loss = x.tanh().mean()
        elif kind == "log":
            loss = (x.square() + 1).log().sum() * 0.1
        else:
            loss = nn.functional.cross_entropy(x, torch.tensor([0, 3, 5, 1]))
        world.losses[one.out] = loss * scale
        world.note("loss", world.losses[one.out])

    return run


@statement("penalty", lambda random: (random.randrange(2), random.randrange(8)))
def _penalty(world: Training, one: Statement) -> Run:
    """Adds the norm of a parameter to a loss."""
    part, number = one.args

    def run() -> None:
        parameter = world.parameter(part, number)
        loss = world.losses.get(one.ins[0])
        if parameter is not None and loss is not None and parameter.is_floating_point():
            world.losses[one.ins[0]] = loss + 0.01 * parameter.square().sum()

    return run


BACKWARDS = ("plain",) * 6 + ("retain", "inputs", "thread", "grad", "create_graph")


def draw_backward(random: Random) -> tuple[Any, ...]:
    return (random.choice(BACKWARDS),)


@statement("backward", draw_backward)
def _backward(world: Training, one: Statement) -> Run:
    (how,) = one.args

    def run() -> None:
        loss = world.losses.get(one.ins[0])
        if loss is None or not loss.requires_grad:
            return
        if how == "retain":
            loss.backward(retain_graph=True)
            loss.backward()
        elif how == "thread":
            _on_a_thread(loss.backward)
        elif how == "create_graph":
            loss.backward(create_graph=True)
        elif how in ("inputs", "grad"):
            wanted = [one for part in world.nets for one in world.parameters(part) if one.requires_grad]
            if how == "inputs":
                loss.backward(inputs=wanted)
                return
            for parameter, slope in zip(wanted, torch.autograd.grad(loss, wanted, allow_unused=True), strict=True):
                if slope is not None:
                    parameter.grad = slope if parameter.grad is None else parameter.grad + slope
        else:
            loss.backward()

    return run


CLIPS = ("norm", "norm", "inf norm", "foreach", "loop", "value", "total", "by hand", "each", "logged")


@statement("clip", lambda random: (random.choice(CLIPS), random.randrange(2)), 1.2)
def _clip(world: Training, one: Statement) -> Run:
    how, part = one.args

    def run() -> None:
        parameters = world.parameters(part)
        given = [one for one in parameters if one.grad is not None] if how == "total" else parameters
        if given:
            found = _clipped(how, given)
            if found is not None:
                world.note(f"norm ({how})", found)

    return run


def _clipped(how: str, parameters: list[nn.Parameter]) -> Tensor | None:
    utils = nn.utils
    if how == "value":
        utils.clip_grad_value_(parameters, 0.05)
        return None
    if how == "total":
        norm = utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
        utils.clip_grads_with_norm_(parameters, 0.2, norm)
        return norm
    if how == "by hand":
        for one in parameters:
            if one.grad is not None:
                one.grad.mul_(0.5)
        return None
    if how == "each":
        for one in parameters:
            utils.clip_grad_norm_(one, 0.1)
        return None
    if how == "logged":
        norms = [one.grad.norm() for one in parameters if one.grad is not None]
        return torch.stack(norms) if norms else None
    if how == "inf norm":
        return utils.clip_grad_norm_(parameters, 0.1, norm_type=float("inf"))
    foreach = {"foreach": True, "loop": False}.get(how)
    return utils.clip_grad_norm_(parameters, 0.1, foreach=foreach)


STEPPED = ("plain",) * 6 + ("closure", "scaler", "skipped", "profiled")


def draw_step(random: Random) -> tuple[Any, ...]:
    return (random.choice(STEPPED),)


@statement("step")
def _step(world: Training, one: Statement) -> Run:
    """A step of one optimizer: plain, with a closure, or by a GradScaler that skips every third one."""
    part, how = one.args

    def run() -> None:
        optimizer = world.optimizers.get(part)
        if optimizer is None:
            return
        if how == "closure":
            net = world.nets[part]

            def closure() -> Any:
                optimizer.zero_grad()
                loss = net(world.batch()).square().mean()
                if loss.requires_grad:
                    loss.backward()
                world.note("loss in a closure", loss)
                return loss

            optimizer.step(closure)
        elif how == "scaler":
            _step_by_scaler(world, optimizer, part)
        elif how != "skipped" or world.step % 3 != 1:
            optimizer.step()

    return run


def _step_by_scaler(world: Training, optimizer: torch.optim.Optimizer, part: int) -> None:
    scaler = world.copies.get(("scaler", part))
    if scaler is None:
        scaler = world.copies["scaler", part] = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
        scaler.scale(torch.zeros(()))
    gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    if not gradients:
        return
    if world.step % 3 == 1:
        gradients[0].fill_(float("inf"))
    del gradients
    scaler.step(optimizer)
    scaler.update()
    world.trace.append((f"scale {scaler.get_scale()}", b""))


ZEROS = ("none", "none", "none", "zeros", "model", "model zeros", "by hand", "detached zeros")


@statement("zero_grad", lambda random: (random.randrange(2), random.choice(ZEROS)), 0.7)
def _zero_grad(world: Training, one: Statement) -> Run:
    part, how = one.args

    def run() -> None:
        optimizer, net = world.optimizers.get(part), world.nets.get(part)
        if how in ("none", "zeros") and optimizer is not None:
            optimizer.zero_grad(set_to_none=how == "none")
        elif how.startswith("model") and net is not None:
            net.zero_grad(set_to_none=how == "model")
        elif net is not None:
            for parameter in net.parameters():
                if parameter.grad is not None and how == "detached zeros":
                    parameter.grad.detach_().zero_()
                else:
                    parameter.grad = None

    return run


@statement("raise", lambda random: (random.choice(["between", "forward", "backward"]), random.randrange(3)), 0.6)
def _raise(world: Training, one: Statement) -> Run:
    where, number = one.args

    def run() -> None:
        if not world.is_looping:
            return
        if where == "between":
            raise PlannedError("between")
        if where == "forward":
            world.clock.raises_behind = number
            return
        parameter = world.parameter(0, number)
        if parameter is not None and parameter.requires_grad:
            step = world.step

            def hook(gradient: Tensor) -> None:
                if world.step == step:
                    raise PlannedError("in a backward")

            parameter.register_hook(hook)

    return run
