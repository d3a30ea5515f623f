"""Wrong arguments and optimizers that cannot step in slices: one sentence each, before anything has moved."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import vdnn
from tests.runtime.training_state.conftest import Manage, on_host, open_session
from tests.runtime.training_state.loops import OPTIMIZERS, Net, ScaledByAll, SignOfMomentum, begin, same
from tests.runtime.training_state.test_lives import one_step, outcome, state_bytes
from vdnn import _C
from vdnn.errors import VdnnError

ADAMW = OPTIMIZERS["adamw"]


def test_an_optimizer_over_parameters_that_are_not_the_models_is_refused() -> None:
    model, other = Net(), Net()
    optimizer = torch.optim.AdamW([*model.parameters(), other.head.weight])
    with pytest.raises(ValueError, match=r"parameter 10 of group 0, of shape \[4, 12\], is not one of the model's"):
        vdnn.offload("vdnn-all", device="sim", model=model, optimizer=optimizer)


def test_an_optimizer_over_the_models_parameters_is_taken() -> None:
    model = Net()
    vdnn.offload("vdnn-all", device="sim", model=model, optimizer=torch.optim.AdamW(model.parameters()))


def test_a_model_without_an_optimizer_has_no_meaning() -> None:
    with pytest.raises(ValueError, match="Give optimizer= as well"):
        vdnn.offload("vdnn-all", device="sim", model=Net())


@pytest.mark.parametrize("wrong", [Net(), "adam", [torch.optim.AdamW(Net().parameters()), None]])
def test_what_is_no_optimizer_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="optimizer: expected a torch.optim.Optimizer, or several, got"):
        vdnn.offload("vdnn-all", device="sim", optimizer=wrong)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, got list"):
        vdnn.offload("vdnn-all", device="sim", model=[], optimizer=begin(ADAMW).optimizer)  # type: ignore[arg-type]


def test_the_optimizer_inside_of_a_wrapper_is_managed() -> None:
    accelerate = pytest.importorskip("accelerate")
    training = begin(ADAMW)
    wrapper = accelerate.Accelerator(cpu=True).prepare(training.optimizer)
    assert wrapper is not training.optimizer
    with contextlib.closing(open_session(_C.SimDevice(), wrapper)) as session, session:
        training.loss().backward()
        wrapper.step()
        assert on_host(training.optimizer) == state_bytes(training)


def test_one_optimizer_given_twice_is_refused() -> None:
    optimizer = begin(ADAMW).optimizer
    with pytest.raises(ValueError, match="the same optimizer is there twice"):
        vdnn.offload("vdnn-all", device="sim", optimizer=[optimizer, optimizer])


def test_two_sessions_cannot_manage_one_optimizer() -> None:
    training = begin(ADAMW)
    device = _C.SimDevice()
    with contextlib.closing(open_session(device, training.optimizer)) as first:
        second = open_session(_C.SimDevice(), training.optimizer)
        with first:
            one_step(training)
            with pytest.raises(VdnnError, match="this AdamW is managed by another session"), second:
                pass
            one_step(training)
            assert on_host(training.optimizer) == state_bytes(training)
        with first, first:  # the same session may be entered twice
            one_step(training)


def test_a_refused_session_manages_none_of_its_optimizers() -> None:
    one, other = begin(ADAMW), begin(ADAMW)
    device = _C.SimDevice()
    with contextlib.closing(open_session(device, other.optimizer)) as first, first:
        second = open_session(device, [one.optimizer, other.optimizer])
        with pytest.raises(VdnnError, match="managed by another session"), second:
            pass
        one_step(one)
        assert on_host(one.optimizer) == 0
        with open_session(device, one.optimizer):
            one_step(one)


def test_lbfgs_is_refused() -> None:
    optimizer = torch.optim.LBFGS(Net().parameters())
    with pytest.raises(VdnnError, match="LBFGS cannot be stepped in slices of its parameters: it steps along one"):
        vdnn.offload("vdnn-all", device="sim", optimizer=optimizer)


def test_a_differentiable_step_is_refused() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1, differentiable=True)
    with pytest.raises(VdnnError, match="differentiable=True keeps its state in the graph"):
        vdnn.offload("vdnn-all", device="sim", optimizer=optimizer)


def test_an_optimizer_that_mixes_parameters_is_found_by_a_trial() -> None:
    training = begin(ScaledByAll)
    before = torch.random.get_rng_state()
    with pytest.raises(VdnnError, match="ScaledByAll cannot be stepped in slices .* depends on others"):
        vdnn.offload("vdnn-all", device="sim", optimizer=training.optimizer)
    assert torch.equal(before, torch.random.get_rng_state())
    assert not training.optimizer.state


class SumsInAnOption(SignOfMomentum):
    """Has a running mean over all parameters in a tensor of its group, in place, as D-adaptation does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["total"] = torch.zeros(1)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["total"].mul_(0.9)
            for parameter in group["params"]:
                group["total"].add_(parameter.grad.abs().sum())
        return super().step(closure)


def test_an_optimizer_that_sums_over_all_parameters_in_an_option_is_found_by_a_trial() -> None:
    with pytest.raises(VdnnError, match="it changes tensors among its options by what is in a slice"):
        vdnn.offload("vdnn-all", device="sim", optimizer=begin(SumsInAnOption).optimizer)


class CountsInAList(SignOfMomentum):
    """Appends to a list at each call of its step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.log: list[int] = []

    def step(self, closure: Any = None) -> Any:
        self.log.append(len(self.log))
        return super().step(closure)


def test_an_optimizer_that_counts_its_calls_where_that_cannot_be_set_back_is_refused() -> None:
    with pytest.raises(VdnnError, match="CountsInAList cannot be stepped in slices .* it counts its own calls"):
        vdnn.offload("vdnn-all", device="sim", optimizer=begin(CountsInAList).optimizer)


class DrawsOnce(SignOfMomentum):
    """Draws one random number in each step, and ignores it: only the generator shows that."""

    draw: Callable[[], float]

    def step(self, closure: Any = None) -> Any:
        type(self).draw()
        return super().step(closure)


class DrawsFromPython(DrawsOnce):
    draw = random.random


class DrawsFromNumpy(DrawsOnce):
    draw = np.random.random


class DrawsFromTorch(DrawsOnce):
    draw = staticmethod(lambda: torch.rand(()).item())


class DrawsForEach(SignOfMomentum):
    """Draws for each parameter, which slices do as well."""

    def step(self, closure: Any = None) -> Any:
        for _ in self.param_groups[0]["params"]:
            random.random()
        return super().step(closure)


@pytest.mark.parametrize("make", [DrawsFromPython, DrawsFromNumpy, DrawsFromTorch])
def test_an_optimizer_that_draws_once_for_a_step_is_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(VdnnError, match="it draws random numbers once for all parameters"):
        vdnn.offload("vdnn-all", device="sim", optimizer=begin(make).optimizer)


@pytest.mark.parametrize("make", [DrawsFromPython, DrawsFromNumpy, DrawsFromTorch, DrawsForEach])
def test_a_trial_leaves_the_programs_random_numbers_as_they_were(make: Callable[[Any], Any]) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.random()), torch.rand(()).item()]

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    optimizer = begin(make).optimizer
    seed()
    expected = draw()
    seed()
    with contextlib.suppress(VdnnError):
        vdnn.offload("vdnn-all", device="sim", optimizer=optimizer)
    assert draw() == expected


class Options:
    """The options of single parameters, as bitsandbytes keeps them."""

    def __init__(self) -> None:
        self.index2config: dict[tuple[int, int], dict[str, Any]] = {}


class Codes(torch.Tensor):
    def __deepcopy__(self, memo: Any) -> Any:
        return self.detach().clone()


class Quantized(SignOfMomentum):
    """Has a table of a quantization, which every parameter's state has too, an object of its own, and a flag that its
    first step sets, as bitsandbytes; and a state of another class, as torchao."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.tables = {"signed": torch.linspace(-1, 1, 256)}
        self.mng = Options()
        self.initialized = False

    def step(self, closure: Any = None) -> Any:
        self.initialized = True
        loss = super().step(closure)
        for parameter in (one for group in self.param_groups for one in group["params"]):
            self.state[parameter]["table"] = self.tables["signed"]
            self.state[parameter].setdefault("codes", torch.zeros(4).as_subclass(Codes))
        return loss


def test_tables_and_objects_of_an_optimizer_are_no_reason_to_refuse_it_but_options_by_place_are(manage: Manage) -> None:
    plain, training = begin(Quantized), begin(Quantized)
    with manage(training.optimizer) as session:
        for one in (plain, training):
            one_step(one)
            one_step(one)
        means = sum(one.nbytes for one in training.model.parameters())
        assert on_host(training.optimizer) == means  # the table is held by the optimizer
        assert "10 tensors of it stay on the device: Codes is no plain tensor" in session.report()
    assert same(outcome(plain), outcome(training))
    refused = begin(Quantized)
    refused.optimizer.mng.index2config[0, 1] = {"optim_bits": 32}  # type: ignore[attr-defined]
    with pytest.raises(VdnnError, match="single parameters have options, which it finds by their places"):
        vdnn.offload("vdnn-all", device="sim", optimizer=refused.optimizer)


class ReadsTheModel(SignOfMomentum):
    """Needs tensors that are not in its groups."""

    def __init__(self, params: Any) -> None:
        parameters = list(params)
        super().__init__(parameters)
        self.all = parameters

    def step(self, closure: Any = None) -> Any:
        self.scale = sum(one.detach().sum() for one in self.all)
        return super().step(closure)


class WrapsAnother(SignOfMomentum):
    """Has an optimizer of its own, which has all parameters."""

    def __init__(self, params: Any) -> None:
        parameters = list(params)
        super().__init__(parameters)
        self.wrapped = type("Wrapped", (), {})()
        self.wrapped.inner = torch.optim.SGD(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        return self.wrapped.inner.step(closure)


def test_an_optimizer_that_cannot_be_tried_is_refused_with_the_reason() -> None:
    with pytest.raises(VdnnError, match="a step on small parameters failed .*'wrapped'"):
        vdnn.offload("vdnn-all", device="sim", optimizer=begin(WrapsAnother).optimizer)
    with pytest.raises(VdnnError, match="a step on small parameters failed .*'all'"):
        vdnn.offload("vdnn-all", device="sim", optimizer=begin(ReadsTheModel).optimizer)


def test_without_a_device_the_optimizer_steps_by_itself() -> None:
    training = begin(ADAMW)
    session = vdnn.offload("vdnn-all", min_bytes=0, optimizer=training.optimizer)
    with pytest.warns(vdnn.VdnnWarning) as warned, session:
        one_step(training)
    assert "tensors on the CPU are passed through" in str(warned[0].message)
    assert on_host(training.optimizer) == 0
