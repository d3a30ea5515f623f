"""Chains of operations: where they stop, what they read, what they own, and what they compute."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.runtime.recompute.saving import Saving, operation_names
from vdnn.runtime.recompute import Recipe, observe

Tensor = torch.Tensor


def _last(saving: Saving) -> Recipe:
    assert saving.failures == []
    return saving.recipes[-1]


def _saves(tensor: Tensor) -> Tensor:
    """An operation that saves `tensor`."""
    return tensor * torch.ones((), requires_grad=True)


@pytest.fixture
def x() -> Tensor:
    leaf = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    observe(leaf)
    return leaf


def test_a_convolution_batch_norm_and_relu_keep_one_map(x: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1))
    before = [one.clone() for one in model[1].buffers()]
    with Saving(expensive=False) as saving:
        model(x)
    assert [recipe.name for recipe in saving.recipes] == ["relu <- batch_norm", "relu <- batch_norm"]
    recipe = _last(saving)
    assert (recipe.template.depth, recipe.template.operand_depths, recipe.is_cheap) == (2, (2,), True)
    assert recipe.operands[0].geometry[1] == (2, 4, 4, 4)
    after = list(model[1].buffers())
    assert int(after[2]) == 1, "the running statistics moved once, in forward"
    with torch.no_grad():
        expected = before[0] * 0.9 + 0.1 * model[0](x).mean((0, 2, 3))
    torch.testing.assert_close(after[0], expected)


def test_the_nearest_saved_value_is_taken(x: Tensor) -> None:
    with Saving() as saving:
        made = x.exp()  # saves its result
        _saves(made.neg())
    recipe = _last(saving)
    assert (recipe.name, recipe.template.depth, len(recipe.operands)) == ("neg", 1, 1)


def test_what_another_operation_saved_of_an_output_is_found(x: Tensor) -> None:
    with Saving() as saving:
        mapped = functional.avg_pool2d(x.neg(), 2)  # avg_pool2d saves its input; the node of neg does not
        held = _saves(mapped)
        _saves(mapped.neg())
    assert (_last(saving).name, _last(saving).template.depth) == ("neg", 1)
    del held
    with Saving() as saving:
        mapped = functional.avg_pool2d(x.neg(), 2)
        _saves(mapped)  # the graph of this save is released at once
        _saves(mapped.neg())
    assert _last(saving).name == "neg <- avg_pool"


def test_an_operand_that_occurs_twice_is_asked_for_once(x: Tensor) -> None:
    with Saving() as saving:
        made = x.exp()
        negative = made.neg()
        _saves(negative.add(made.neg()) + negative)
    recipe = _last(saving)
    assert operation_names(recipe) == ("neg", "neg", "add", "add")
    assert len(recipe.operands) == 1


def test_no_chain_is_longer_than_allowed(x: Tensor) -> None:
    def recomputed(max_depth: int) -> int:
        with Saving(max_depth) as saving:
            made = x.exp()
            _saves(made.neg().view(2, -1).neg().t().neg().contiguous())
        return max((recipe.template.depth for recipe in saving.recipes if recipe.name.startswith("clone")), default=0)

    assert [recomputed(most) for most in (3, 4, 5)] == [0, 4, 4]


def test_dear_operations_need_asking_for(x: Tensor) -> None:
    def names(*, expensive: bool) -> list[str]:
        with Saving(expensive=expensive) as saving:
            _saves(torch.bmm(x[0].neg(), x[1].neg()))
        return [recipe.name for recipe in saving.recipes if not recipe.is_cheap]

    assert names(expensive=True) == ["bmm"]
    assert names(expensive=False) == []


@pytest.mark.parametrize("dense", [lambda x: x.transpose(1, 3), lambda x: x.permute(2, 0, 3, 1), lambda x: x[None]])
def test_a_view_that_fills_its_storage_is_recomputed_with_its_strides(x: Tensor, dense: object) -> None:
    assert callable(dense)
    with Saving() as saving:
        view = dense(x.neg())
        _saves(view)
    made = _last(saving).recompute(saving.unpack)
    assert (made.stride(), made.storage_offset()) == (view.stride(), 0)


def test_a_part_is_recomputed_as_the_whole_that_it_is_a_part_of(x: Tensor) -> None:
    with Saving() as saving:
        whole = x.neg()
        _saves(whole.chunk(3, 1)[1])
    assert _last(saving).recompute(saving.unpack).shape == whole.shape


def test_the_original_strides_come_back(x: Tensor) -> None:
    last = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    observe(last)
    with Saving() as saving:
        _saves(last.relu().clone(memory_format=torch.contiguous_format))
    assert _last(saving).recompute(saving.unpack).is_contiguous()


def test_pooling_indices_are_recomputed_from_what_was_pooled(x: Tensor) -> None:
    with Saving(expensive=False) as saving:
        _saves(functional.max_pool2d(x.neg(), 3, 2, 1).relu())
    assert "max_pool indices" in saving.names
    assert saving.failures == []


def test_autocast_and_function_modes_do_not_reach_a_recompute(x: Tensor) -> None:
    with Saving() as saving, torch.autocast("cpu", torch.bfloat16):
        _saves(torch.bmm(x[0].neg(), x[1].neg()).float())  # in bfloat16; torch.bmm under autocast would cast again
        recipe = _last(saving)
        assert recipe.recompute(saving.unpack).requires_grad is False
    assert "bmm" in operation_names(recipe)


def test_a_recipe_is_the_same_for_the_same_work_and_another_for_other(x: Tensor) -> None:
    def signature(scale: float, shape: tuple[int, ...] = (2, 288)) -> object:
        with Saving() as saving:
            _saves((x * scale).view(shape))
        return _last(saving).signature

    assert signature(2.0) == signature(2.0)
    assert hash(signature(2.0)) == hash(signature(2.0))
    assert len({signature(2.0), signature(3.0), signature(2.0, (4, 144))}) == 3
    torch.use_deterministic_algorithms(True)
    try:
        deterministic = signature(2.0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert deterministic != signature(2.0)


def test_a_graph_that_is_dropped_frees_all_without_the_collector(x: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    gc.collect()
    gc.disable()
    try:
        with Saving(recomputes=False) as saving:
            loss = _saves(model(x).exp())
        recipes = saving.recipes
        operands = [weakref.ref(operand) for recipe in recipes for operand in recipe.operands]
        assert operands
        node = weakref.ref(_Witness.on(loss))
        del loss
        assert node() is None, "a recipe holds the graph"
        assert all(operand() is not None for operand in operands), "a recipe holds what it reads"
        recipes.clear()
        del saving
        assert [operand() for operand in operands] == [None] * len(operands)
    finally:
        gc.enable()


class _Witness:
    """An object that lives as long as the graph of a tensor: it is stored on the graph's first node."""

    @classmethod
    def on(cls, tensor: Tensor) -> _Witness:
        witness = cls()
        node = tensor.grad_fn
        while node is not None and node.next_functions and node.next_functions[0][0] is not None:
            if node.name() == "NativeBatchNormBackward0":
                break
            node = node.next_functions[0][0]
        assert node is not None
        node.metadata["witness"] = witness
        return witness


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _alone(x: Tensor, run: Callable[[Tensor], Tensor]) -> Saving:
    """The recipes that are found if nothing between `x` and the last save is saved."""
    with Saving() as saving:
        run(x) * torch.ones((), requires_grad=True)
    return saving


@pytest.mark.parametrize(
    "copied",
    [
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.clone(memory_format=torch.channels_last),
        lambda x: x.to(torch.float64, memory_format=torch.channels_last),
        lambda x: x.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format),
    ],
)
@pytest.mark.parametrize(
    "read", [lambda made: made.mean((2, 3)), lambda made: made.sum(1), lambda made: made.double().sum()]
)
def test_what_was_copied_to_an_unknown_format_is_not_summed(
    read: Callable[[Tensor], Tensor], copied: Callable[[Tensor], Tensor]
) -> None:
    """A channels-last copy is summed in another order than a contiguous one: the last bit differs."""
    x = torch.randn(3, 7, 33, 17, generator=torch.Generator().manual_seed(3), requires_grad=True)
    observe(x)
    saving = _alone(x, lambda x: read(copied(x)))
    assert saving.failures == []
    assert saving.recipes == []


def test_what_was_copied_is_read_by_what_rounds_once_and_by_what_copies(x: Tensor) -> None:
    saving = _alone(x, lambda x: torch.relu(x.contiguous(memory_format=torch.channels_last).neg() + x))
    assert saving.failures == []
    assert saving.recipes[-1].name == "relu <- add <- neg <- clone"


def test_a_copy_of_less_dimensions_is_summed() -> None:
    x = torch.randn(9, 33, requires_grad=True)
    observe(x)
    saving = _alone(x, lambda x: x.clone().mean(1))
    assert saving.failures == []
    assert [recipe.name for recipe in saving.recipes] == ["mean <- clone"]
