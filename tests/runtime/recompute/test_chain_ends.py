"""Operations and writes that end a chain, and operands that a recipe refuses: changed values are not read."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.runtime.recompute.saving import Saving
from vdnn.errors import OperandModifiedError, VdnnError
from vdnn.runtime.recompute import find_recipe, observe

Tensor = torch.Tensor


class Doubled(torch.autograd.Function):
    """An operation whose node is defined in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def _saves(tensor: Tensor) -> Tensor:
    return tensor * torch.ones((), requires_grad=True)


def _written_in_part(x: Tensor) -> Tensor:
    whole = x.neg()
    whole[:, 1].relu_()
    return whole


def _given_numbers_to_be(x: Tensor) -> Tensor:
    return x.neg().index_select(1, torch.tensor([1, 0]))


ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "an added number": lambda x: x.neg() + 1e-5,
    "an operand without a gradient": lambda x: x.neg() + torch.ones(6),
    "a custom function": lambda x: Doubled.apply(x.neg()),
    "a write to a part": _written_in_part,
    "an operation that nobody looked at": _given_numbers_to_be,
    "a fill value": lambda x: functional.pad(x.neg(), (1, 1), value=2.0),
    "a masked fill": lambda x: x.neg().masked_fill(x.detach() > 0, 3.0),
    "random noise": lambda x: functional.rrelu(x.neg(), training=True),
    "a norm whose bias has no gradient": lambda x: functional.batch_norm(
        x.neg(), None, None, torch.ones(8, requires_grad=True), torch.ones(8), True
    ),
    "a norm whose eps no frame has": lambda x: torch.layer_norm(x.neg(), (6,)),
    "a convolution whose bias has no gradient": lambda x: functional.conv2d(
        x.neg(), torch.ones(2, 8, 1, 1, requires_grad=True), torch.ones(2)
    ),
}


@pytest.fixture
def x() -> Tensor:
    leaf = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    observe(leaf)
    return leaf


@pytest.mark.parametrize("name", ENDS)
def test_it_ends_a_chain(name: str, x: Tensor) -> None:
    with Saving() as saving:
        made = ENDS[name](x)
        before = len(saving.recipes)
        _saves(made)
    assert len(saving.recipes) == before, saving.recipes[-1].name
    assert saving.failures == []


def test_what_was_saved_under_other_hooks_is_not_read(x: Tensor) -> None:
    with Saving() as saving:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: ("theirs", tensor), lambda held: held[1]):
            made = functional.gelu(x.detach().exp().requires_grad_())
        _saves(made)
    assert saving.recipes == []


def test_a_checkpointed_region_is_not_run_by_looking_at_it(x: Tensor) -> None:
    runs = 0

    def region(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return functional.gelu(functional.gelu(x))

    with Saving() as saving:
        _saves(checkpoint(region, x.neg(), use_reentrant=False))
    assert runs == 1
    assert saving.failures == []


def test_a_reentrant_checkpoint_ends_a_chain(x: Tensor) -> None:
    with Saving() as saving:
        made = checkpoint(functional.gelu, x.neg(), use_reentrant=True)
        before = len(saving.recipes)
        _saves(made)
    assert len(saving.recipes) == before


def test_a_save_that_was_written_to_since_is_passed_by_for_what_made_it(x: Tensor) -> None:
    with Saving() as saving:
        made = x.neg()
        mapped = functional.gelu(made)  # saves made
        made.mul_(2)
        _saves(mapped)
    assert saving.failures == []
    assert saving.recipes[-1].name == "gelu <- neg"


@pytest.mark.parametrize("write", [lambda made: made.detach().mul_(2), lambda made: _without_a_graph(made)])
def test_what_was_written_behind_autograds_back_is_not_recomputed(write: Callable[[Tensor], Tensor], x: Tensor) -> None:
    norm = nn.GroupNorm(2, 8)
    with Saving() as saving:
        made = norm(x.neg())
        write(made)
        before = len(saving.recipes)
        _saves(made)
        assert len(saving.recipes) == before
        changed = norm(x.neg()).relu_().mul_(2)  # as the graph shows
        _saves(changed)
    assert saving.recipes[-1].name == "mul <- relu <- group_norm"
    assert saving.failures == []


def _without_a_graph(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.mul_(2)


def test_a_leaf_that_was_given_other_memory_is_refused(x: Tensor) -> None:
    with Saving() as saving:
        _saves(x.neg())
    x.data = x.detach().clone()
    with pytest.raises(VdnnError, match=r"the parameter of shape \(2, 8, 6, 6\) that it reads has other memory than"):
        saving.recipes[-1].recompute(saving.unpack)


def test_a_leaf_that_nobody_looked_at_before_is_not_read() -> None:
    leaf = torch.randn(4, requires_grad=True)
    with Saving() as saving:
        _saves(leaf.neg())
    assert saving.recipes == []


def test_complex_arithmetic_that_may_have_been_in_place_ends_a_chain() -> None:
    """Torch's CPU kernel of complex division gives another last bit when it overwrites its dividend."""
    x = torch.randn(50, dtype=torch.complex64, requires_grad=True)
    observe(x)
    with Saving() as saving:
        _saves(x.clone().div_(x.detach()))
    assert saving.failures == []
    assert [recipe.name for recipe in saving.recipes if "div" in recipe.name] == []


def test_a_leaf_that_changed_between_its_use_and_the_save_is_not_read(x: Tensor) -> None:
    with Saving() as saving:
        made = x.neg()
        with torch.no_grad():
            x.add_(1)
        _saves(made)
        observe(x)
        _saves(made)
    assert saving.recipes == []


def test_a_leaf_that_changed_after_the_save_is_refused_by_name(x: Tensor) -> None:
    with Saving() as saving:
        _saves(x.neg())
    (recipe,) = saving.recipes
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(OperandModifiedError, match=r"\[2, 8, 6, 6\]\] is at version 1; expected version 0 .* by neg"):
        recipe.recompute(saving.unpack)


def test_an_operation_that_fails_is_named(x: Tensor) -> None:
    with Saving() as saving:
        _saves(x.exp().neg())
    recipe = saving.recipes[-1]
    with pytest.raises(VdnnError, match=r"by neg: neg made shape \(3,\), expected \(2, 8, 6, 6\)"):
        recipe.recompute(lambda packed: torch.ones(3))


def test_a_released_graph_is_not_taken_for_one_without_weights(x: Tensor) -> None:
    """After a backward every slot is empty, also that of the weight."""
    norm = nn.LayerNorm(6).requires_grad_(False)
    norm.weight.fill_(2)
    with Saving() as saving:
        made = norm(x.neg())
        made.sum().backward()
        before = len(saving.recipes)
        _saves(made)
    assert len(saving.recipes) == before
    assert saving.failures == []


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", ["batch", "instance", "group", "layer", "rms"])
def test_a_norm_of_a_module_is_recomputed(kind: str, affine: bool, x: Tensor) -> None:
    made: nn.Module
    if kind == "batch":
        made = nn.BatchNorm2d(8, eps=1e-2, affine=affine)
    elif kind == "instance":
        made = nn.InstanceNorm2d(8, eps=1e-2, affine=affine)
    elif kind == "group":
        made = nn.GroupNorm(2, 8, eps=1e-2, affine=affine)
    elif kind == "layer":
        made = nn.LayerNorm((6,), eps=1e-2, elementwise_affine=affine)
    else:
        made = nn.RMSNorm((6,), eps=1e-2, elementwise_affine=affine)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    with Saving(expensive=False) as saving:
        before = len(saving.recipes)
        _saves(made(x.exp()))
    assert saving.failures == []
    recomputed = [recipe.name for recipe in saving.recipes[before:]]
    if kind != "rms":  # written out on the CPU, with an eps that its sum does not keep
        assert any("norm" in name for name in recomputed), recomputed


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_is_recomputed_in_training_and_in_evaluation(training: bool, x: Tensor) -> None:
    norm = nn.BatchNorm2d(8).train(training)
    norm.running_mean.normal_()
    with Saving(expensive=False) as saving:
        _saves(norm(x.exp()))
        statistics = [one.clone() for one in norm.buffers()]
        assert saving.failures == []
        assert any("batch_norm" in recipe.name for recipe in saving.recipes)
    assert all(torch.equal(one, other) for one, other in zip(norm.buffers(), statistics, strict=True))


class _OnCuda:
    """A node of the graph whose outputs are said to be on a GPU."""

    def __init__(self, node: Any) -> None:
        self._node = node
        (output,) = node._input_metadata
        on_cuda = SimpleNamespace(dtype=output.dtype, shape=output.shape, is_nested_tensor=False)
        on_cuda.device = torch.device("cuda", 0)
        self._input_metadata = [on_cuda]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("on_cuda", [False, True], ids=["cpu", "cuda"])
@pytest.mark.parametrize("timed", [False, True])
def test_a_convolution_whose_algorithm_is_timed_on_each_thread_ends_a_chain(
    *, timed: bool, on_cuda: bool, deterministic: bool
) -> None:
    """Deterministic algorithms are timed as well, and two of them may differ in bits."""
    x, layer = torch.randn(2, 3, 8, 8, requires_grad=True), nn.Conv2d(3, 4, 3)
    with torch.backends.cudnn.flags(enabled=True, benchmark=timed, deterministic=deterministic), Saving() as saving:
        made, product = layer(x), x[0, 0] @ x[0, 0]
        nodes: list[Any] = [_OnCuda(one.grad_fn) if on_cuda else one.grad_fn for one in (made, product)]
        recipes = [
            find_recipe(one, node, saving.unpack, max_depth=8, expensive=True)
            for one, node in zip((made, product), nodes, strict=True)
        ]
    assert (recipes[0] is None) == (timed and on_cuda)
    assert recipes[1] is not None, "cuBLAS times nothing"
