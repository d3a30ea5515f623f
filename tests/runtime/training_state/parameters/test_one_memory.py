"""A parameter has one memory: whoever writes to it or holds it, on the host or on the device, sees what plain PyTorch
shows (#38). What left the device is poisoned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.training_state.conftest import Manage
from tests.runtime.training_state.parameters.writing_programs import (
    MODELS,
    WIDTH,
    Inside,
    Writing,
    _no_grad,
    batches,
    made,
    optimizer_of,
    plain,
    same,
    train,
    with_linear,
)
from vdnn.errors import VdnnError

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def all_away(manage: Manage) -> Inside:
    return lambda model, optimizer: manage(optimizer, model=model, parameters="all")


@pytest.fixture
def frozen_away(manage: Manage) -> Inside:
    return lambda model, optimizer: manage(None, model=model, parameters="frozen")


# Writes, from the first and from the third call on.


@pytest.mark.parametrize("model", MODELS)
def test_a_training_that_writes_to_its_parameters_has_the_bits_of_plain_pytorch(model: str, all_away: Inside) -> None:
    assert same(train(made(model)), train(made(model), all_away))


@pytest.mark.parametrize("model", [name for name in MODELS if name.startswith(("write", "follow", "max-norm"))])
def test_frozen_parameters_that_are_written_to_have_the_bits_too(model: str, frozen_away: Inside) -> None:
    def frozen() -> nn.Module:
        one = made(model)
        for parameter in list(one.parameters())[2:]:
            parameter.requires_grad_(False)
        return one

    assert same(train(frozen()), train(frozen(), frozen_away))


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_every_form_of_the_step_goes_on_from_what_was_written(options: dict[str, bool], all_away: Inside) -> None:
    assert same(train(made("write-data"), **options), train(made("write-data"), all_away, **options))


# Aliases.

ALIASES: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "detach": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "view": lambda weight: weight.detach().view(-1),
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy()),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
    "storage": lambda weight: torch.empty(0).set_(weight.untyped_storage()),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("taken", ["before", "between", "inside"])
@pytest.mark.parametrize("what", ["all", "frozen"])
def test_an_alias_of_a_parameter_sees_it_and_writes_to_it(what: str, taken: str, alias: str, manage: Manage) -> None:
    def run(inside: Inside) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model, kept = with_linear(nn.Linear(WIDTH, WIDTH)), list[torch.Tensor]()
        model.requires_grad_(what == "all")
        model[2].requires_grad_(True)  # type: ignore[index]
        weight: Any = model.get_parameter("1.weight")
        take = partial(ALIASES[alias], weight)
        optimizer = optimizer_of(model)
        if taken == "inside":
            model[1].register_forward_hook(lambda *_: None if kept else kept.append(take()))  # type: ignore[index]
        if taken == "before":
            kept.append(take())
        found = []
        with inside(model, optimizer):
            if taken == "between":
                kept.append(take())
            for batch in batches():
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                kept[0].mul_(0.9)
                found += [loss.detach(), kept[0].clone(), weight.detach().clone()]
        return found

    inside: Inside = lambda model, optimizer: manage(optimizer, model=model, parameters=what)  # noqa: E731
    assert same(run(plain), run(inside))


def test_a_state_dict_from_before_is_named_and_still_the_parameters(manage: Manage) -> None:
    model = with_linear()
    optimizer, saved = optimizer_of(model), model.state_dict()
    with manage(optimizer, model=model, parameters="all") as session:
        for batch in batches():
            model(batch).square().mean().backward()
            optimizer.step()
            assert all(map(torch.equal, saved.values(), model.state_dict().values()))
        report = session.report()
    assert "parameter 0.weight stays on the device: the program holds its memory" in report
    assert all(map(torch.equal, saved.values(), model.state_dict().values()))


def test_the_report_names_a_few_of_many_whose_memory_is_held(manage: Manage) -> None:
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(8)])
    kept: list[torch.Tensor] = []
    for one in model:
        one.register_forward_hook(lambda module, *_: kept.append(module.weight.detach()))
    with manage(optimizer_of(model), model=model, parameters="all") as session:
        model(torch.randn(4, 16)).sum().backward()
        lines = session.report().splitlines()
        held = [index for index, line in enumerate(lines) if "while the program holds its memory" in line]
        assert [lines[index].split()[1] for index in held] == ["0.weight", "1.weight", "2.weight"]
        assert lines[held[-1] + 1] == "  5 more parameters like the one before"
        kept.clear()


def test_what_the_program_holds_of_a_copy_leaves_once_it_is_let_go(manage: Manage) -> None:
    model = with_linear()
    kept: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, *_: kept.append(module.weight.detach()))  # type: ignore[index,arg-type]
    optimizer, weight = optimizer_of(model), model.get_parameter("0.weight")
    with manage(optimizer, model=model, parameters="all") as session:
        model(batches()[0]).sum().backward()
        assert weight.data_ptr() == kept[0].data_ptr()
        assert "parameter 0.weight stays on the device while the program holds its memory" in session.report()
        address = weight.data_ptr()
        kept.clear()
        optimizer.step()
        assert weight.data_ptr() != address


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("is_the_sessions", [True, False])
def test_a_step_of_a_copy_that_the_program_holds_outlives_its_holder(
    is_the_sessions: bool, options: dict[str, bool], manage: Manage
) -> None:
    """Fused steps write without a new version."""

    def run(inside: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model, kept = with_linear(), list[torch.Tensor]()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options) for _ in range(2)]
        model[0].register_forward_hook(lambda module, *_: kept.append(module.weight.detach()))  # type: ignore[index,arg-type]
        with inside(model, optimizers[0]):
            for batch in batches():
                model(batch).square().mean().backward()
                optimizers[not is_the_sessions].step()
                kept.clear()
                optimizers[0].zero_grad()
        return [one.detach().clone() for one in model.parameters()]

    managed = lambda model, optimizer: manage(optimizer, model=model, parameters="all", recheck=0)  # noqa: E731
    assert same(run(plain), run(managed))


@pytest.mark.parametrize("kind", ["swapped", "copied"])
def test_an_average_that_is_put_in_place_and_taken_out_again_has_the_bits(kind: str, all_away: Inside) -> None:
    """As many EMA classes do: apply_shadow() and restore()."""

    def run(inside: Inside) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model = with_linear()
        optimizer = optimizer_of(model)
        found = []
        with inside(model, optimizer):
            shadow = {name: one.data.clone() for name, one in model.named_parameters()}
            for batch in batches():
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                for name, one in model.named_parameters():
                    shadow[name] = 0.9 * shadow[name] + 0.1 * one.data
                backup = {
                    name: one.data if kind == "swapped" else one.data.clone() for name, one in model.named_parameters()
                }
                for name, one in model.named_parameters():
                    one.data = shadow[name] if kind == "swapped" else shadow[name].clone()
                with torch.no_grad():
                    found.append(model(batch))
                for name, one in model.named_parameters():
                    one.data = backup[name]
                found.append(model(batch).detach())
        return found + [one.detach() for one in model.parameters()]

    assert same(run(plain), run(all_away))


@pytest.mark.parametrize("when", ["ahead of the forward", "ahead of the step", "behind the step"])
@pytest.mark.parametrize("kind", ["load_state_dict", "swap_tensors"])
def test_parameters_that_are_swapped_have_the_bits(kind: str, when: str, manage: Manage) -> None:
    """As torch does under set_swap_module_params_on_conversion(True), also in the first steps."""

    def changed(model: nn.Module) -> None:
        if kind == "load_state_dict":
            model.load_state_dict({name: value.clone() * 0.5 for name, value in model.state_dict().items()})
            return
        for parameter in model.parameters():
            other = nn.Parameter(parameter.detach() * 0.75)
            other.grad = None if parameter.grad is None else parameter.grad.clone()
            torch.utils.swap_tensors(parameter, other)

    def run(inside: Inside) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model, found = with_linear(), list[torch.Tensor]()
        optimizer = optimizer_of(model)
        with inside(model, optimizer):
            for number, batch in enumerate(batches()):
                if when == "ahead of the forward" and number:
                    changed(model)
                model(batch).square().mean().backward()
                if when == "ahead of the step":
                    changed(model)
                found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
                optimizer.step()
                if when == "behind the step":
                    changed(model)
                optimizer.zero_grad()
        return found + [one.detach().clone() for one in model.parameters()]

    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    managed: Inside = lambda model, optimizer: manage(  # noqa: E731
        optimizer, model=model, parameters="all", policy="recompute-all"
    )
    try:
        assert same(run(plain), run(managed))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("what", ["all", "frozen"])
def test_the_edge_of_a_parameters_gradient_is_found_between_calls(what: str, manage: Manage) -> None:
    model = with_linear()
    optimizer = optimizer_of(model)
    with manage(optimizer, model=model, parameters=what):
        for batch in batches():
            for parameter in model.parameters():
                assert (
                    torch.autograd.graph.get_gradient_edge(parameter).node.name() == "torch::autograd::AccumulateGrad"
                )
            model(batch).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("alias", ["numpy", "dlpack", "detach"])
@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_memory_of_the_host_sees_what_is_written_while_the_copy_stays_in_place(
    options: dict[str, bool], alias: str, manage: Manage
) -> None:
    """The program holds memory of both: the module's writes and the steps are in the two."""

    def run(inside: Inside) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model = with_linear(Writing(_no_grad(lambda weight: weight.mul_(0.9)), first=0))
        weight, optimizer = model.get_parameter("1.weight"), optimizer_of(model, **options)
        aliases, kept, found = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        with inside(model, optimizer):
            for number, batch in enumerate(batches()):
                if number == 1:
                    aliases.append(ALIASES[alias](weight))  # type: ignore[arg-type]
                    model[1].register_forward_pre_hook(lambda module, _: kept.append(module.weight.detach()))  # type: ignore[index]
                loss = model(batch).square().mean()
                found += [one.clone() for one in aliases]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found += [one.clone() for one in (*aliases, *kept)]
        return found

    managed: Inside = lambda model, optimizer: manage(optimizer, model=model, parameters="all", recheck=1)  # noqa: E731
    assert same(run(plain), run(managed))


@pytest.mark.parametrize("alias", ["numpy", "dlpack"])
def test_an_alias_of_data_that_were_replaced_in_a_module_keeps_them(alias: str, manage: Manage) -> None:
    def run(inside: Inside) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model = with_linear(Writing(lambda weight: setattr(weight, "data", weight.data * 0.9)))
        optimizer, found = optimizer_of(model), list[torch.Tensor]()
        with inside(model, optimizer):
            for batch in batches(5):
                found.append(ALIASES[alias](model.get_parameter("1.weight")))  # type: ignore[arg-type]
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return [one.clone() for one in found]

    managed: Inside = lambda model, optimizer: manage(optimizer, model=model, parameters="all", recheck=1)  # noqa: E731
    assert same(run(plain), run(managed))


@pytest.mark.parametrize("write", ["numpy", "dlpack"])
def test_memory_of_the_host_sees_what_torch_does_not_count(write: str, manage: Manage) -> None:
    def run(inside: Inside) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model, aliases, found = with_linear(Writing(UNSEEN[write])), list[torch.Tensor](), list[torch.Tensor]()
        optimizer = optimizer_of(model)
        with inside(model, optimizer):
            for batch in batches(5):
                aliases.append(model.state_dict()["1.weight"])
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                found += [one.clone() for one in aliases]
        return found

    managed: Inside = lambda model, optimizer: manage(optimizer, model=model, parameters="all", recheck=1)  # noqa: E731
    assert same(run(plain), run(managed))


@pytest.mark.parametrize("alias", ["numpy", "dlpack", "storage"])
@pytest.mark.parametrize("when", ["behind a graph that is gone", "ahead of the second use", "ahead of the backward"])
def test_what_is_written_on_the_host_between_calls_is_used_where_a_graph_keeps_the_copy_in_place(
    when: str, alias: str, manage: Manage
) -> None:
    """The layer is used twice in one graph, so its copy on the device is in place from its first use to its gradient.
    torch counts none of these writes, so its backward reads what they left."""

    def run(inside: Inside) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model, found, aliases = with_linear(), list[torch.Tensor](), list[torch.Tensor]()
        optimizer, layer = optimizer_of(model), model.get_submodule("1")

        def write(now: str) -> None:
            if now == when:
                for one in aliases:
                    one.mul_(0.5)

        with inside(model, optimizer):
            for number, batch in enumerate(batches(5)):
                if number == 1:
                    aliases += [ALIASES[alias](one) for one in layer.parameters()]  # type: ignore[arg-type]
                hidden = model(batch)
                found.append(layer(hidden).detach())
                del hidden
                write("behind a graph that is gone")
                hidden = model(batch)
                write("ahead of the second use")
                loss = layer(hidden).square().mean()
                write("ahead of the backward")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found += [loss.detach(), *(one.clone() for one in (*aliases, *layer.parameters()))]
        return found

    managed: Inside = lambda model, optimizer: manage(optimizer, model=model, parameters="all", recheck=1)  # noqa: E731
    assert same(run(plain), run(managed))


def test_unfreezing_a_parameter_whose_memory_of_the_host_is_held_is_refused_with_its_name(manage: Manage) -> None:
    model = with_linear(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    with manage(optimizer_of(model), model=model, parameters="frozen"):
        model(batches()[0]).sum().backward()
        kept = model.state_dict()
        model.requires_grad_(True)
        with pytest.raises(VdnnError, match=r"parameter 1\.weight has to be on the device from now on, because it was"):
            model(batches()[1])
        kept.clear()
        model(batches()[1]).sum().backward()
        assert model.get_parameter("1.weight").grad is not None


def test_a_penalty_on_a_parameter_whose_memory_of_the_host_is_held_is_refused_with_its_name(manage: Manage) -> None:
    model = with_linear()
    optimizer, weight = optimizer_of(model), model.get_parameter("1.weight")
    with manage(optimizer, model=model, parameters="all"):
        loss = model(batches()[0]).square().mean()
        kept = weight.detach()
        with pytest.raises(
            VdnnError, match=r"parameter 1\.weight has to be on the device from now on, because it is read"
        ):
            (loss + weight.square().sum()).backward()
        del kept
        (loss + weight.square().sum()).backward()


# Hooks and steps in unusual places.


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_a_hook_behind_the_accumulation_sees_the_sum_of_plain_pytorch(
    when: str, micro_batches: int, all_away: Inside
) -> None:
    def run(inside: Inside) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = with_linear(nn.Linear(WIDTH, WIDTH))
        optimizer, found = optimizer_of(model), list[torch.Tensor]()

        def log() -> None:
            for one in model.parameters():
                one.register_post_accumulate_grad_hook(lambda p: found.append(p.grad.clone()))  # type: ignore[union-attr]

        if when == "before":
            log()
        with inside(model, optimizer):
            if when == "inside":
                log()
            for number, batch in enumerate(batches()):
                model(batch).square().mean().backward()
                if number % micro_batches == micro_batches - 1:
                    optimizer.step()
                    optimizer.zero_grad()
        return found + [one.detach() for one in model.parameters()]

    assert same(run(plain), run(all_away))


@pytest.mark.parametrize("kind", ["forward-hook", "module-hook", "inside"])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_a_step_while_a_module_runs_is_the_optimizers(kind: str, options: dict[str, bool], manage: Manage) -> None:
    """Greedy training, layer by layer: backward and a step in a forward hook, or in forward itself."""

    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.step: Callable[[nn.Module, torch.Tensor], object] | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x.detach() * self.scale).tanh()
                if self.step is not None:
                    self.step(layer, x)
            return x

    def run(inside: Any) -> list[torch.Tensor]:
        torch.manual_seed(6)
        model = Greedy()
        optimizers = [torch.optim.Adam(one.parameters(), lr=1e-2, **options) for one in model.layers]
        optimizers[0].add_param_group({"params": [model.scale]})
        known = dict(zip(model.layers, optimizers, strict=True))
        found = []

        def step(layer: nn.Module, outcome: torch.Tensor) -> None:
            loss = outcome.square().mean()
            loss.backward(retain_graph=kind != "inside")
            known[layer].step()
            optimizers[0].step()
            known[layer].zero_grad()
            found.append(loss.detach())

        if kind == "inside":
            model.step = step
        elif kind == "forward-hook":
            for layer in model.layers:
                layer.register_forward_hook(lambda module, args, outcome: step(module, outcome))
        with inside(model, optimizers):
            handle: Any = None
            if kind == "module-hook":
                hooks = torch.nn.modules.module
                handle = hooks.register_module_forward_hook(
                    lambda module, args, outcome: step(module, outcome) if module in known else None
                )
            for batch in batches():
                found.append(model(batch).detach())
            if handle is not None:
                handle.remove()
        return found + [one.detach() for one in model.parameters()]

    managed = lambda model, optimizers: manage(optimizers, model=model, parameters="all")  # noqa: E731
    assert same(run(plain), run(managed))


# What torch does not count.


def _through_dlpack(weight: torch.Tensor) -> None:
    # A consumer of its own, which has no version counter in common with the parameter.
    torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())).mul_(0.9)


def _through_its_address(weight: torch.Tensor) -> None:
    import ctypes

    values = (ctypes.c_float * 4).from_address(weight.data_ptr())
    for index in range(4):
        values[index] = 0.5 * values[index]


UNSEEN: dict[str, Callable[[torch.Tensor], object]] = {
    "dlpack": _through_dlpack,
    "numpy": lambda weight: weight.detach().numpy().__imul__(0.9),
    "storage": lambda weight: torch.empty(0).set_(weight.untyped_storage()).mul_(0.9),  # type: ignore[call-overload]
    "address": _through_its_address,
}


BETWEEN: dict[str, Callable[[torch.Tensor], object]] = {
    "mul_": _no_grad(lambda weight: weight.mul_(0.9)),
    "data": lambda weight: weight.data.mul_(0.9),
    "detach": lambda weight: weight.detach().mul_(0.9),
    **UNSEEN,
}


# torch itself refuses a backward behind a write that it counts.
_BEHIND_WRITES = {"a call": [*BETWEEN], "a backward": ["data", *UNSEEN], "a step": [*BETWEEN]}


@pytest.mark.parametrize(
    ("ahead_of", "write"), [(ahead_of, write) for ahead_of, writes in _BEHIND_WRITES.items() for write in writes]
)
def test_a_write_between_calls_that_memory_of_the_host_does_not_see_is_refused_with_the_name(
    ahead_of: str, write: str, manage: Manage
) -> None:
    model = with_linear()
    optimizer, kept = optimizer_of(model), list[torch.Tensor]()
    weight = model.get_parameter("1.weight")
    with manage(optimizer, model=model, parameters="all", recheck=1):
        model(batches()[0]).square().mean().backward()
        held = weight.detach()
        handle = model[1].register_forward_hook(lambda module, *_: kept.append(module.weight.detach()))  # type: ignore[index]
        loss = model(batches()[1]).square().mean()
        if ahead_of == "a step":
            loss.backward()
        BETWEEN[write](weight)
        with pytest.raises(VdnnError, match=r"parameter 1.weight was written to between calls of modules"):
            {"a call": partial(model, batches()[1]), "a backward": loss.backward, "a step": optimizer.step}[ahead_of]()
        assert torch.equal(held, weight)
        handle.remove()
        kept.clear()
        optimizer.step()
        BETWEEN[write](weight)
        assert torch.equal(held, weight)
        model(batches()[2]).square().mean().backward()
        optimizer.step()
        assert torch.equal(held, weight)


@pytest.mark.parametrize("write", UNSEEN)
def test_a_write_that_torch_does_not_count_is_kept_where_every_use_was_checked(write: str, manage: Manage) -> None:
    def model() -> nn.Module:
        torch.manual_seed(2)
        return with_linear(Writing(UNSEEN[write], first=0))

    def inside(model: nn.Module, optimizer: Any) -> Any:
        return manage(optimizer, model=model, parameters="all")

    assert same(train(model()), train(model(), inside))


@pytest.mark.parametrize("write", UNSEEN)
def test_one_that_is_found_late_is_refused_with_names_and_the_line(write: str, manage: Manage) -> None:
    torch.manual_seed(2)
    model = with_linear(Writing(UNSEEN[write], first=4))
    optimizer = optimizer_of(model)
    with manage(optimizer, model=model, parameters="all", recheck=4):

        def go_on() -> None:
            for batch in batches(4 + 2 * 4):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        with pytest.raises(VdnnError, match=r"parameter 1\.weight was written to while 1 \(Writing\) ran") as raised:
            go_on()
        assert f"{__file__}:" in str(raised.value)
        model(batches()[0]).sum().backward()
        optimizer.step()  # the parameter stays on the device from now on


@pytest.mark.parametrize("alias", ["detach", "data", "numpy"])
@pytest.mark.parametrize("writes_both", [False, True])
def test_a_write_on_the_host_that_comes_too_late_for_a_module_is_refused(
    alias: str, manage: Manage, *, writes_both: bool
) -> None:
    """Also if the module writes to its own copy as well: one of the two would be lost."""

    def write(weight: torch.Tensor) -> None:
        kept[0].mul_(0.5)
        if writes_both:
            weight.data.mul_(0.9)

    torch.manual_seed(2)
    kept: list[torch.Tensor] = []
    model = with_linear(Writing(write, first=1))
    optimizer, weight = optimizer_of(model), model.get_parameter("1.weight")
    with manage(optimizer, model=model, parameters="all"):
        model(batches()[0]).square().mean().backward()
        kept.append(ALIASES[alias](weight))  # type: ignore[arg-type]
        expected = 0.5 * kept[0]
        with pytest.raises(VdnnError, match=r"parameter 1\.weight was written to on the host while 1 \(Writing\) ran"):
            model(batches()[1])
        assert torch.equal(weight, expected)
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("model", ["max-norm", "follow-copy"])
def test_a_state_dict_that_is_held_refuses_no_write_of_a_module(model: str, manage: Manage) -> None:
    """Also where an operation counts as a write and changes nothing."""
    kept: list[Any] = []

    def inside(model: nn.Module, optimizer: Any) -> Any:
        model.register_forward_pre_hook(lambda module, args: kept.append(module.state_dict()) if not kept else None)
        return manage(optimizer, model=model, parameters="all")

    assert same(train(made(model)), train(made(model), inside))


class Scaled(nn.Module):
    """Saves its weight itself for the backward, where a linear layer saves a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH) * 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize("kind", [Scaled, partial(nn.RMSNorm, WIDTH), partial(nn.Linear, WIDTH, WIDTH)])
@pytest.mark.parametrize("policy", ["keep", "recompute-all"])
def test_data_that_are_replaced_between_forward_and_backward_are_used_as_torch_uses_them(
    policy: str, kind: Callable[[], nn.Module], manage: Manage
) -> None:
    """The data of now where the graph saved the parameter, and those of before where it saved a view."""

    def run(inside: Any) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model = with_linear(kind())
        optimizer, found = optimizer_of(model), list[torch.Tensor]()
        with inside(model, optimizer):
            for batch in batches():
                loss = model(batch).square().mean()
                for one in model.parameters():
                    one.data = one.data * 0.9
                loss.backward()
                found += [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
                optimizer.step()
                optimizer.zero_grad()
        return found + [one.detach().clone() for one in model.parameters()]

    managed = lambda model, optimizer: manage(optimizer, model=model, parameters="all", policy=policy)  # noqa: E731
    assert same(run(plain), run(managed))


def test_a_backward_whose_memory_of_replaced_data_is_gone_is_refused_with_the_name(manage: Manage) -> None:
    model = with_linear()
    optimizer, weight = optimizer_of(model), model.get_parameter("1.weight")
    with manage(optimizer, model=model, parameters="all"):
        loss = model(batches()[0]).square().mean()
        weight.data = weight.data * 0.9
        model(batches()[1])
        with pytest.raises(VdnnError, match=r"the data of parameter 1\.weight were replaced"):
            loss.backward()


@pytest.mark.parametrize("write", ["numpy", "dlpack", "storage", "address"])
@pytest.mark.parametrize("when", ["between", "inside"])
def test_a_write_to_a_copy_that_waits_for_its_gradient_is_kept_where_every_use_is_checked(
    when: str, write: str, manage: Manage
) -> None:
    """A weight that a graph uses twice waits on the device, also while nothing runs."""

    def run(inside: Any) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model = with_linear(nn.Linear(WIDTH, WIDTH))
        weight, optimizer = model.get_parameter("1.weight"), optimizer_of(model)
        found, is_writing = list[torch.Tensor](), False

        def changed(*_: object) -> None:
            if is_writing:
                UNSEEN[write](weight)

        if when == "inside":
            model.register_forward_pre_hook(changed)
        with inside(model, optimizer):
            for number, batch in enumerate(batches(5)):
                first = model(batch)
                is_writing = number >= 3
                if when == "between":
                    changed()
                found += [first.detach(), model(batch).detach(), weight.detach().clone()]
                is_writing = False
                del first
        return found

    managed = lambda model, optimizer: manage(optimizer, model=model, parameters="all", recheck=1)  # noqa: E731
    assert same(run(plain), run(managed))


@pytest.mark.parametrize("what", ["all", "frozen"])
def test_what_a_module_writes_to_memory_of_the_host_ahead_of_its_childs_call_is_used(what: str, manage: Manage) -> None:
    """Writes by numpy to memory that the program took between calls: no counter shows it, and the child's copy is not
    fetched ahead or used again."""

    def run(inside: Any) -> list[torch.Tensor]:
        torch.manual_seed(4)

        class Parent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.child = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
                self.child.requires_grad_(what == "all")
                self.array: Any = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.first(x)
                for _ in range(2):
                    if self.array is not None:
                        self.array *= 0.9
                    with torch.no_grad():
                        x = x + self.child(x)
                return x

        model = Parent()
        weight, optimizer = model.child.weight, optimizer_of(model)
        found = []
        with inside(model, optimizer):
            for number, batch in enumerate(batches(5)):
                if number == 3:
                    model.array = weight.detach().numpy()
                found += [model(batch).detach(), weight.detach().clone()]
        return found

    managed = lambda model, optimizer: manage(optimizer, model=model, parameters=what, recheck=0)  # noqa: E731
    assert same(run(plain), run(managed))


def test_an_alias_of_data_that_were_replaced_does_not_see_the_new_ones(all_away: Inside) -> None:
    def run(inside: Inside) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model = with_linear()
        weight, optimizer = model.get_parameter("0.weight"), optimizer_of(model)
        with inside(model, optimizer):
            alias = weight.detach()
            weight.data = torch.ones(WIDTH, WIDTH)
            loss = model(batches()[0]).sum().detach()
        return [alias, loss, weight.detach()]

    assert same(run(plain), run(all_away))
