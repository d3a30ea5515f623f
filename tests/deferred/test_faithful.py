"""The accelerator computes the same bits as the CPU, and defers every operation."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from deferred import DeferredAccelerator, Mode
from tests.deferred.models import MODELS, on_the_accelerator, step_of
from tests.runtime.rigs.side_by_side import differences, outcome


@pytest.mark.parametrize("mode", [Mode.COMPUTE_LATE, Mode.RANDOM], ids=["compute_late", "random"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_cpu(name: str, mode: Mode) -> None:
    model, x = MODELS[name].make(), MODELS[name].make_input()
    cpu_model = copy.deepcopy(model)
    plain = outcome(step_of(cpu_model, x), [cpu_model])
    with DeferredAccelerator(mode, seed=1, capacity="8MiB") as accelerator:
        there, x_there = on_the_accelerator(model, x)
        ours = [
            (label, None if found is None else found.cpu())
            for label, found in outcome(step_of(there, x_there), [there])
        ]
        assert accelerator.synchronous_operations == {}
        del there, x_there
        assert accelerator.violations == []
    assert not differences(plain, ours)


RECURRENT: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "lstm of doubles, batch first": (lambda: nn.LSTM(6, 5, batch_first=True).double(), 3),
    "lstm without biases": (lambda: nn.LSTM(6, 5, num_layers=2, bidirectional=True, bias=False), 3),
    "gru, two layers": (lambda: nn.GRU(6, 5, num_layers=2, batch_first=True), 3),
    "tanh, both directions": (lambda: nn.RNN(6, 5, bidirectional=True), 3),
    "relu": (lambda: nn.RNN(6, 5, nonlinearity="relu", bias=False), 3),
    "lstm cell": (lambda: nn.LSTMCell(6, 5), 2),
    "gru cell": (lambda: nn.GRUCell(6, 5), 2),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_are_those_of_the_cpu(name: str) -> None:
    make, dimensions = RECURRENT[name]
    if name == "lstm without biases" and torch.__version__ < "2.13":
        pytest.skip("this torch says wrong shapes for its gradients")
    model = make()
    x = torch.randn(*(4, 2, 6)[3 - dimensions :], dtype=next(model.parameters()).dtype)

    def step_of_all_results(model: nn.Module, x: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        def step() -> list[torch.Tensor]:
            results = [leaf for leaf in tree_leaves(model(x)) if isinstance(leaf, torch.Tensor)]
            torch.stack([result.square().sum() for result in results]).sum().backward()
            return results

        return step

    cpu_model = copy.deepcopy(model)
    plain = outcome(step_of_all_results(cpu_model, x), [cpu_model])
    with DeferredAccelerator(Mode.RANDOM, seed=1, capacity="1MiB") as accelerator:
        there, x_there = on_the_accelerator(model, x)
        found = outcome(step_of_all_results(there, x_there), [there])
        ours = [(label, None if one is None else one.cpu()) for label, one in found]
        assert accelerator.synchronous_operations == {}
        del there, x_there, found
    assert not differences(plain, ours)


def test_an_lstm_that_only_infers_is_that_of_the_cpu() -> None:
    model, x = nn.LSTM(6, 5).eval(), torch.randn(4, 2, 6)
    with torch.no_grad():
        expected = model(x)[0]
        with DeferredAccelerator(Mode.COMPUTE_LATE, capacity="1MiB"):
            there, x_there = on_the_accelerator(model, x)
            for grad_mode in (False, True, False):
                with torch.set_grad_enabled(grad_mode):
                    assert torch.equal(there(x_there)[0].detach().cpu(), expected)
            del there, x_there


def operations_with(key: str) -> set[str]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name for name in torch._C._dispatch_get_all_op_names() if has_kernel(name, key)}


def test_autocast_has_rules_for_what_it_has_on_the_cpu() -> None:
    ours, of_the_cpu = operations_with("AutocastPrivateUse1"), operations_with("AutocastCPU")
    if torch.__version__ < "2.13":
        of_the_cpu = {one for one in of_the_cpu if "imname" not in one}  # named axes
    is_new = torch.__version__ >= "2.15"
    assert ours - of_the_cpu == ({"aten::cholesky", "aten::qr"} if is_new else set())
    assert of_the_cpu - ours == ({"aten::linalg_matrix_sqrth"} if is_new else set())


AUTOCAST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bfloat16: linear": lambda x: nn.functional.linear(x, x),
    "bfloat16: matmul": lambda x: x @ x,
    "bfloat16: convolution": lambda x: nn.functional.conv2d(x[None, None], x[None, None]),
    "float32: prod": lambda x: x.bfloat16().prod(),
    "float32: mse": lambda x: nn.functional.mse_loss(x.bfloat16(), x.bfloat16()),
    "the widest: cat": lambda x: torch.cat([x.bfloat16(), x]),
    "the widest of narrow ones": lambda x: torch.stack([x.bfloat16(), x.bfloat16()]),
    "untouched: softmax": lambda x: x.bfloat16().softmax(-1),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_casts_as_on_the_cpu(name: str) -> None:
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = AUTOCAST[name](x)
    with DeferredAccelerator(capacity="1MiB"):
        there = x.to("deferred")
        with torch.autocast("deferred", dtype=torch.bfloat16):
            found = AUTOCAST[name](there)
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected)
        del there, found


def test_nothing_that_the_cpu_has_a_kernel_for_is_made_of_other_operations() -> None:
    """A composite kernel would take precedence over the fallback, and would sum in another order."""
    composites = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    made_of_others = set().union(*map(operations_with, composites))
    own = {name for name in operations_with("CPU") & made_of_others if name.startswith("aten::")}
    assert "aten::silu_backward" in own
    assert own <= operations_with("PrivateUse1")


def test_a_stream_computes_with_as_many_threads_as_the_program_asked_for() -> None:
    """A thread that has not asked torch for the number of threads uses another one, which changes the last bits of some
    products."""
    bias, x, weight = torch.randn(24), torch.randn(10, 16), torch.randn(24, 16)
    expected = torch.addmm(bias, x, weight.t())
    for mode in Mode:
        with DeferredAccelerator(mode, capacity="1MiB"):
            there = [one.to("deferred") for one in (bias, x, weight)]
            assert torch.equal(torch.addmm(there[0], there[1], there[2].t()).cpu(), expected)
            del there


def test_dropout_draws_what_the_cpu_draws(mode: Mode) -> None:
    """The draws follow the order of the calls, whenever they run, as long as one stream draws."""
    torch.manual_seed(4)
    expected = [nn.functional.dropout(torch.ones(100), 0.5) for _ in range(3)]
    with DeferredAccelerator(mode, capacity="1MiB"):
        torch.manual_seed(4)
        drawn = [nn.functional.dropout(torch.ones(100, device="deferred"), 0.5) for _ in range(3)]
        assert all(torch.equal(one.cpu(), other) for one, other in zip(drawn, expected, strict=True))


def test_the_peak_of_a_chain_is_that_of_the_closed_form() -> None:
    depth, rows, width = 5, 32, 16
    plane = rows * width * 4
    with DeferredAccelerator(Mode.RANDOM, seed=3, capacity="1MiB") as accelerator:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(depth)))
        model, x = on_the_accelerator(model, torch.randn(rows, width))
        weights = depth * width * width * 4
        assert accelerator.memory.allocated_bytes == weights + plane
        accelerator.reset_peak()
        out = model(x)
        # The result of each Linear is released once its Tanh is queued on the stream: the backward does not need it.
        assert accelerator.memory.allocated_bytes == weights + plane + depth * plane
        assert accelerator.memory.peak_bytes == weights + plane + depth * plane + plane
        accelerator.reset_peak()
        out.backward(torch.ones_like(out))
        # The peak is at the last Linear: every plane, the given gradient, the gradients of its result and of its input,
        # and one weight's gradient. Later, a plane is released for each weight's gradient that is added.
        assert accelerator.memory.peak_bytes == weights + plane + depth * plane + 3 * plane + width * width * 4
        del out
        assert accelerator.memory.allocated_bytes == 2 * weights + plane
        assert not accelerator.violations
