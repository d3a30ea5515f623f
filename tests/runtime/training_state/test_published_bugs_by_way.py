"""More bugs that others published of offloaded training state, each with its number, in every way that it leaves here.

The name of a test ends with repository and number. The tests are ours; what each issue saw is in its docstring.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.training_state.conftest import Manage
from tests.runtime.training_state.loops import OPTIMIZERS, STEPS, Loop, SignOfMomentum, Training, begin, same
from tests.runtime.training_state.parameters.frozen_loops import MODELS, WIDTH, LowRank
from tests.runtime.training_state.test_lives import one_step, outcome
from tests.runtime.training_state.ways import ON_THE_DEVICE, WAYS, options_for, options_of
from tests.runtime.training_state.ways import ways_on_the_device as ways
from vdnn.runtime.training_state.optimizer_state import state_of

ADAMW = OPTIMIZERS["adamw"]
Run = Callable[[Any, nn.Module], contextlib.AbstractContextManager[Any]]


def plain(optimizer: Any, model: nn.Module) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def managed_in(way: str, manage: Manage, optimizer: Any, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    return manage(optimizer, **options_of(way, model))


def check_same(run: Callable[[Run], Any], way: str, manage: Manage) -> None:
    assert same(run(plain), run(partial(managed_in, way, manage)))


# Loops of trainings. Everything that they come to is compared.


def norm_that_clips_torchtune_1934(training: Training) -> None:
    """An optimizer that steps in the backward pass cannot clip, and pytorch/torchtitan#990 silently clipped nothing."""
    for _ in training.steps(STEPS):
        training.loss().backward()
        norm = nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3)
        assert norm > 1e-3
        training.found.append(norm.clone())
        training.optimizer.step()


def norms_of_micro_batches_deepspeed_7967(training: Training) -> None:
    """Gradients of all micro-batches but the first were dropped, so the norm was too small."""
    for _ in training.steps(STEPS):
        norms = []
        for _ in range(3):
            training.loss().backward()
            gradients = [one.grad for one in training.model.parameters() if one.grad is not None]
            norms.append(nn.utils.get_total_norm(gradients))
        assert norms[0] < norms[1] < norms[2]
        training.found += norms
        training.optimizer.step()


def summed_and_then_clipped_axolotl_1448(training: Training) -> None:
    """Clipping and accumulation were asked for with gradients that do not stay on the device: an optimizer that steps
    as gradients are made has neither. In deepspeedai/DeepSpeed#7981 all backward passes but the last were dropped."""
    for step in training.steps(STEPS):
        for _ in range(1 + step % 4):
            (training.loss() / 3).backward()
        training.found.append(nn.utils.clip_grad_norm_(training.model.parameters(), 0.02).clone())
        training.optimizer.step()


def accumulation_that_begins_before_the_loop_deepspeed_671(training: Training) -> None:
    """The step raised KeyError if the norm of the first micro-batch had not been noted."""
    training.loss().backward()  # before the first step, and never cleared
    for _ in training.steps(STEPS):
        training.loss().backward()
        training.loss().backward()
        training.optimizer.step()


def each_parameter_of_each_slice_deepspeed_2272(training: Training) -> None:
    """Gradients that were not the last of their group stayed behind: the loss fell 25 times more slowly."""
    for _ in training.steps(STEPS):
        trained = [one for one in training.model.parameters() if one.requires_grad]
        before = [one.detach().clone() for one in trained]
        training.loss().backward()
        training.optimizer.step()
        assert not any(map(torch.equal, before, trained))


def fine_tune_from_loaded_weights_olmo_478(training: Training) -> None:
    """From weights of a checkpoint, with micro-batches, clipping and a warm-up, the loss rose from the first step."""
    trained = begin(ADAMW)
    for _ in range(3):
        one_step(trained)
    training.model.load_state_dict(trained.model.state_dict())
    warmup = torch.optim.lr_scheduler.LinearLR(training.optimizer, 0.1, total_iters=5)
    batch = next(training.batches)
    losses = []
    for _ in training.steps(STEPS):
        for part in batch.chunk(3):
            loss = training.model(part).square().mean() / 3
            training.found.append(loss.detach().clone())
            loss.backward()
        losses.append(float(sum(training.found[-3:])))
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.optimizer.step()
        warmup.step()
    assert losses[-1] < losses[0]


def parameters_that_a_step_does_not_use_deepspeed_5241(training: Training) -> None:
    """A trainable parameter without a gradient made the step raise. DeepSpeed#707 is the same symptom."""
    training.model.get_parameter("last.weight").requires_grad_(False)
    for step in training.steps(STEPS):
        training.loss().backward()
        if step % 3:
            training.model.get_parameter("between.bias").grad = None
        if step % 2 == 0:
            training.model.get_parameter("inner.weight").grad = None
        training.optimizer.step()


BUGS = [
    norm_that_clips_torchtune_1934,
    norms_of_micro_batches_deepspeed_7967,
    summed_and_then_clipped_axolotl_1448,
    accumulation_that_begins_before_the_loop_deepspeed_671,
    each_parameter_of_each_slice_deepspeed_2272,
    fine_tune_from_loaded_weights_olmo_478,
    parameters_that_a_step_does_not_use_deepspeed_5241,
]


@ways
@pytest.mark.parametrize("loop", BUGS, ids=lambda loop: loop.__name__)
def test_a_loop_that_went_wrong_elsewhere_has_the_bits_of_plain_pytorch(loop: Loop, way: str, manage: Manage) -> None:
    def run(inside: Run) -> Any:
        training = begin(ADAMW)
        options_for(way, training)
        with inside(training.optimizer, training.model):
            loop(training)
            return outcome(training)

    check_same(run, way, manage)


# The step.


@pytest.mark.filterwarnings("ignore:vdnn. none of:vdnn.VdnnWarning")  # no activations
@ways
def test_all_slices_of_a_step_count_the_same_step_deepspeed_7982(way: str, manage: Manage) -> None:
    """Updates of several subgroups within one step corrected the bias of Adam by other numbers: alike parameters with
    alike gradients went different ways."""
    weights = [nn.Parameter(torch.linspace(-1, 1, 300)) for _ in range(8)]
    model = nn.Module()
    for number, one in enumerate(weights):
        model.register_parameter(f"weight_{number}", one)
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    with managed_in(way, manage, optimizer, model):
        for step in range(5):
            sum(one.pow(3).sum() * (1 + step) for one in weights).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        states = [optimizer.state[one] for one in weights]
    assert all(torch.equal(weights[0], one) for one in weights)
    assert all(same(states[0], one) for one in states)


@ways
def test_each_group_is_stepped_with_its_own_options_deepspeed_7906(way: str, manage: Manage) -> None:
    """Subgroups lost the options of the optimizer's groups: all were stepped with those of one."""

    def run(inside: Run) -> Any:
        training = begin(ADAMW)
        decayed = [one for one in training.model.parameters() if one.dim() == 2]
        others = [one for one in training.model.parameters() if one.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.3, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]
        training.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.9))
        with inside(training.optimizer, training.model):
            for step in range(6):
                training.optimizer.param_groups[step % 2]["lr"] *= 0.7
                one_step(training)
            return outcome(training)

    check_same(run, way, manage)


# Gradients.


@pytest.mark.parametrize("way", [way for way in ON_THE_DEVICE if "gradients" in way])
def test_a_gradient_that_was_consumed_leaves_the_host_prime_rl_3522(way: str, manage: Manage) -> None:
    """All gradients stayed in memory of the host after the optimizer had consumed them, beside parameters and state."""
    training = begin(ADAMW)
    with manage(training.optimizer, **WAYS[way]) as session:
        one_step(training)
        gradients = state_of(training.optimizer).gradients
        for _ in range(3):
            seen: list[int] = []
            training.loss().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            handles = [
                part.register_forward_hook(lambda *_, seen=seen: seen.append(gradients.host_bytes))
                for part in training.model.children()
            ]
            with torch.no_grad():
                training.loss()
            for handle in handles:
                handle.remove()
            assert gradients.host_bytes == 0
            (transport,) = session._engine.transports.opened()
            transport.queue.collect()
            assert transport.pool.stats.live_bytes == state_of(training.optimizer).moved.host_bytes
            if "deferred" in way:  # each module's gradients are consumed ahead of it
                assert seen == sorted(seen, reverse=True)
                assert seen[0] > seen[-1] == 0
            else:
                assert set(seen) == {0}


# Saved and loaded.


@ways
def test_a_loaded_state_brings_options_and_counts_of_its_groups_prime_rl_3561(way: str, manage: Manage) -> None:
    """A resumed optimizer had the tensors of its state, but the counts and options of a new one. After a
    resume with offload, the loss jumped in NVIDIA/Megatron-LM#1842, too."""

    def run(inside: Run) -> Any:
        first = begin(SignOfMomentum)
        with inside(first.optimizer, first.model):
            for _ in range(4):
                one_step(first)
                first.optimizer.param_groups[0]["lr"] *= 0.5
            saved = io.BytesIO()
            torch.save([first.model.state_dict(), first.optimizer.state_dict()], saved)
        saved.seek(0)
        second = begin(SignOfMomentum)
        with inside(second.optimizer, second.model):
            weights, state = torch.load(saved)
            second.model.load_state_dict(weights)
            second.optimizer.load_state_dict(state)
            (group,) = second.optimizer.param_groups
            assert (group["step"], group["lr"]) == (4, 1e-3 / 16)
            for _ in range(3):
                one_step(second)
            return outcome(second)

    check_same(run, way, manage)


# Parameters.


def trained(model: nn.Module, inside: Run, between: Callable[[nn.Module, int], Any] = lambda *_: None) -> list[Any]:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    found: list[Any] = []
    with inside(optimizer, model):
        for step in range(6):
            x = torch.sin(torch.arange(6.0 * WIDTH).view(6, WIDTH) + step)
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.detach().clone(), between(model, step)]
        found += [one.detach().clone() for one in model.parameters()]
        return [*found, copy.deepcopy(optimizer.state_dict())]


@ways
def test_tied_weights_that_two_modules_fetch_cache_dit_1111(way: str, manage: Manage) -> None:
    """An embedding that is the head as well had two copies on the host and two owners: one read what the other had
    half copied. sgl-project/sglang#36509 raised for a parameter with two names."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, WIDTH)
            self.body = LowRank(nn.Linear(WIDTH, WIDTH))
            self.head = nn.Linear(WIDTH, 32, bias=False)
            self.head.weight = self.embedding.weight
            self.alias = self.body

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outcome: torch.Tensor = self.head(self.body(self.embedding((x.abs() * 31).long())))
            return outcome

    def run(inside: Run) -> Any:
        torch.manual_seed(5)
        return trained(Language(), inside)

    check_same(run, way, manage)


@ways
def test_weights_that_are_used_without_their_modules_forward_transformers_46978(way: str, manage: Manage) -> None:
    """A function took the weight of a module without a call of the module, so no hook brought it: results were wrong,
    without a word."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.convolution = nn.Conv1d(1, 1, 3, padding=1)
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x).unsqueeze(1)
            return nn.functional.conv1d(hidden, self.convolution.weight, padding=1).squeeze(1) * self.scale

    def run(inside: Run) -> Any:
        torch.manual_seed(5)
        return trained(Functional(), inside)

    check_same(run, way, manage)


@ways
def test_forwards_without_gradients_in_training_mode_ms_swift_9844(way: str, manage: Manage) -> None:
    """A forward under no_grad between two steps, with the model in training mode, left the bookkeeping of the offload
    ahead of its backward: the next step raised."""

    def run(inside: Run) -> Any:
        torch.manual_seed(5)

        def probability(model: nn.Module, step: int) -> torch.Tensor:
            with torch.no_grad():
                return model(torch.full((2, WIDTH), 0.1 * step)).clone()

        return trained(MODELS["low-rank"]().requires_grad_(), inside, probability)

    check_same(run, way, manage)


@ways
def test_adapters_are_loaded_into_a_model_whose_weights_are_away_diffusers_11791(way: str, manage: Manage) -> None:
    """After offload was turned on, adapters could not be loaded any more."""

    def run(inside: Run) -> Any:
        torch.manual_seed(5)

        def load(model: nn.Module, step: int) -> None:
            adapters = {name: 0.5 * one for name, one in model.state_dict().items() if name.endswith(("up", "down"))}
            if step == 2:
                missing = model.load_state_dict(adapters, strict=False)
                assert not missing.unexpected_keys

        return trained(MODELS["low-rank"](), inside, load)

    check_same(run, way, manage)
