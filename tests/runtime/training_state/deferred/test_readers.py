"""Whoever reads or writes a parameter, its gradient or its state between a step and the next forward pass finds what
plain PyTorch has there, though the step waits."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.training_state.conftest import Manage
from tests.runtime.training_state.loops import OPTIMIZERS, Training, begin, same
from vdnn.errors import VdnnError
from vdnn.runtime.torch_internals.parameter_guard import GuardedParameter
from vdnn.runtime.training_state.optimizer_state import state_of


def saved(what: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(what, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def weight(training: Training) -> nn.Parameter:
    found: Any = training.model
    return found.between.weight  # type: ignore[no-any-return]


def in_a_thread(training: Training) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(weight(training).detach().clone()))
    thread.start()
    thread.join()
    return found[0]


def transformed(training: Training) -> torch.Tensor:
    parameters = dict(training.model.named_parameters())

    def loss(given: Any) -> torch.Tensor:
        outcome: torch.Tensor = torch.func.functional_call(training.model, given, torch.ones(2, 8)).square().mean()
        return outcome

    return torch.func.grad(loss)(parameters)["between.weight"]  # type: ignore[no-any-return]


def in_a_mode(training: Training) -> torch.Tensor:
    with torch.device("cpu"):
        return weight(training) * 2


def inferred(training: Training) -> torch.Tensor:
    with torch.inference_mode():
        return training.model(torch.ones(2, 8)).clone()  # type: ignore[no-any-return]


def jit_traced(training: Training) -> list[Any]:
    """Calls the traced model twice, in case the trace has the step in it."""
    given = torch.ones(2, 8)
    with torch.no_grad():
        made: Any = torch.jit.trace(training.model, given, check_trace=False)
        return [made(given).clone(), made(given).clone(), [one.kind() for one in made.inlined_graph.nodes()]]


def written(training: Training) -> None:
    with torch.no_grad():
        weight(training).mul_(2)
        training.model.head.bias.data.zero_()  # type: ignore[union-attr, operator]


def set_data(training: Training) -> None:
    weight(training).data = torch.ones(12, 12)


def hook(training: Training) -> Any:
    seen: list[torch.Tensor] = []
    handle = training.optimizer.register_step_post_hook(lambda *_: seen.append(weight(training).detach().clone()))
    training.model(torch.ones(2, 8)).sum().backward()
    training.optimizer.step()
    handle.remove()
    return seen


READS: dict[str, Callable[[Training], Any]] = {
    "detach": lambda training: weight(training).detach().clone(),
    "data": lambda training: weight(training).data.clone(),
    "sum": lambda training: weight(training).sum(),
    "in a list": lambda training: torch._foreach_norm([weight(training)]),
    "in torch.stack": lambda training: torch.stack([weight(training), weight(training)]),
    "by keyword": lambda training: torch.add(torch.ones(12, 12), other=weight(training)),
    "index": lambda training: weight(training)[0].clone(),
    "tolist": lambda training: weight(training).tolist(),
    "numpy": lambda training: weight(training).detach().numpy().copy().tolist(),
    "storage": lambda training: bytes(weight(training).untyped_storage()),
    "repr": lambda training: repr(weight(training)),
    "format": lambda training: f"{weight(training).norm():.8f}",
    "operator": lambda training: torch.ops.aten.mul.Tensor(weight(training), 2),
    "pickle": lambda training: pickle.loads(pickle.dumps(weight(training))).detach(),
    "torch.save": lambda training: saved(weight(training)).detach(),
    "torch.save of the state_dict": lambda training: saved(training.model.state_dict()),
    "deepcopy": lambda training: copy.deepcopy(weight(training)),
    "deepcopy of the model": lambda training: list(copy.deepcopy(training.model).parameters()),
    "deepcopy of the optimizer": lambda training: copy.deepcopy(training.optimizer).state_dict(),
    "vector": lambda training: nn.utils.parameters_to_vector(training.model.parameters()),
    "state": lambda training: training.optimizer.state[weight(training)]["exp_avg"].clone(),
    "state_dict": lambda training: copy.deepcopy(training.optimizer.state_dict()),
    "pickled optimizer": lambda training: pickle.loads(pickle.dumps(training.optimizer)).state_dict(),
    "gradient": lambda training: weight(training).grad.clone(),  # type: ignore[union-attr]
    "gradients": lambda training: [one.grad.clone() for one in training.model.parameters() if one.grad is not None],
    "evaluation": lambda training: training.model.eval()(torch.ones(2, 8)).detach(),
    "inference mode": inferred,
    "another thread": in_a_thread,
    "torch.func": transformed,
    "torch.jit.trace": jit_traced,
    "function mode": in_a_mode,
    "step hook": hook,
    "double": lambda training: list(copy.deepcopy(training.model).double().parameters()),
}
WRITES: dict[str, Callable[[Training], Any]] = {
    "in place": written,
    "data": set_data,
    "load_state_dict": lambda training: training.model.load_state_dict(
        {name: 0.9 * value for name, value in training.model.state_dict().items()}
    ),
    "learning rate": lambda training: training.optimizer.param_groups[0].update(lr=0.5),
    "options": lambda training: training.optimizer.param_groups[0].update(weight_decay=0.9, betas=(0.1, 0.2)),
    "state": lambda training: training.optimizer.state[weight(training)]["exp_avg"].zero_(),
    "state cleared": lambda training: training.optimizer.state.clear(),
    "loaded state": lambda training: training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict())),
    "gradients kept": lambda training: None,
    "gradients zeroed in place": lambda training: training.optimizer.zero_grad(set_to_none=False),
    "gradients dropped": lambda training: training.optimizer.zero_grad(),
    "dropped by the model": lambda training: training.model.zero_grad(),
    "zeroed by the model": lambda training: training.model.zero_grad(set_to_none=False),
    "a gradient scaled": lambda training: weight(training).grad.mul_(3),  # type: ignore[union-attr]
    "a gradient replaced": lambda training: setattr(weight(training), "grad", torch.ones(12, 12)),
    "frozen": lambda training: weight(training).requires_grad_(False),
    "group added": lambda training: training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    "another step": lambda training: training.optimizer.step(),
}
ADAMW = OPTIMIZERS["adamw-foreach"]


def stepped(training: Training, *, zeroes: bool = False) -> None:
    training.loss().backward()
    training.optimizer.step()
    if zeroes:
        training.optimizer.zero_grad()


with_gradients = pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])


@pytest.mark.filterwarnings("ignore:`torch.jit.trace(_method)?` is deprecated")
@with_gradients
@pytest.mark.parametrize("read", READS)
def test_a_read_finds_what_is_stepped(read: str, gradients: bool, manage: Manage) -> None:
    plain = begin(ADAMW)
    stepped(plain, zeroes=True)
    stepped(plain)
    expected = READS[read](plain)
    training = begin(ADAMW)
    with manage(training.optimizer, optimizer_step="deferred", gradients=gradients):
        stepped(training, zeroes=True)
        stepped(training)
        assert type(weight(training)) is GuardedParameter
        found = READS[read](training)
        assert same(expected, found)


@with_gradients
@pytest.mark.parametrize("write", WRITES)
def test_a_write_comes_behind_the_step(write: str, gradients: bool, manage: Manage) -> None:
    def run(inside: Any) -> list[Any]:
        training = begin(ADAMW)
        with inside(training.optimizer):
            stepped(training, zeroes=True)
            for _ in range(3):
                stepped(training)
                WRITES[write](training)
            stepped(training)
            outcome = [one.detach().clone() for one in training.model.parameters()]
            gradients = [one.grad for one in training.model.parameters()]
            return [*training.found, *outcome, gradients, copy.deepcopy(training.optimizer.state_dict())]

    expected = run(lambda _: contextlib.nullcontext())
    options = {"optimizer_step": "deferred", "gradients": gradients}
    assert same(expected, run(lambda optimizer: manage(optimizer, **options)))


def test_a_new_state_has_the_default_dtype_of_the_steps_call(manage: Manage) -> None:
    def run(inside: Any) -> Any:
        training = begin(ADAMW)
        with inside(training.optimizer):
            stepped(training)
            torch.set_default_dtype(torch.float64)
            try:
                training.model(torch.ones(2, 8, dtype=torch.float32))
            finally:
                torch.set_default_dtype(torch.float32)
            return copy.deepcopy(training.optimizer.state_dict())

    expected = run(lambda _: contextlib.nullcontext())
    assert same(expected, run(lambda optimizer: manage(optimizer, optimizer_step="deferred")))


def test_facts_of_a_parameter_do_not_end_its_wait(manage: Manage) -> None:
    training = begin(ADAMW)
    with manage(training.optimizer, optimizer_step="deferred"):
        stepped(training, zeroes=True)
        one = weight(training)
        facts = one.shape, one.dtype, one.device, one.numel(), one.size(0), one.requires_grad, one.grad, hash(one)
        assert facts == (torch.Size([12, 12]), torch.float32, torch.device("cpu"), 144, 12, True, None, id(one))
        assert isinstance(one, nn.Parameter)
        assert [kind for kind in map(type, training.model.parameters()) if kind is GuardedParameter]
        assert type(one) is GuardedParameter
    assert type(one) is nn.Parameter


def test_what_the_program_holds_is_stepped_at_once(manage: Manage) -> None:
    """A tensor of before the step that has the memory of a parameter, a gradient, a tensor of the state."""
    training = begin(ADAMW)
    with manage(training.optimizer, optimizer_step="deferred") as session:
        stepped(training, zeroes=True)
        model: Any = training.model
        view = model.inner.weight.detach()
        held = training.optimizer.state[model.head.weight]["exp_avg"]
        before = view.clone(), held.clone()
        training.loss().backward()
        gradient = model.last.weight.grad
        training.optimizer.step()
        kinds = [type(one) for one in (model.inner.weight, model.last.weight, model.head.weight)]
        assert kinds == [nn.Parameter] * 3
        assert type(model.between.weight) is GuardedParameter
        assert not torch.equal(before[0], view)
        assert not torch.equal(before[1], held)
        assert gradient is model.last.weight.grad
        said = session.report()
        assert "1 parameters were stepped at once in the last step: another tensor has its memory" in said
        assert "1 parameters were stepped at once in the last step: the program holds its gradient" in said
        assert "1 parameters were stepped at once in the last step: the program holds its state" in said


def test_a_graph_from_before_the_step_raises_as_in_plain_pytorch(manage: Manage) -> None:
    training = begin(ADAMW)
    with manage(training.optimizer, optimizer_step="deferred"):
        training.loss().backward()
        late = training.loss()
        del late
        later = training.loss()
        training.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            later.backward()


@with_gradients
def test_a_backward_of_before_adds_to_gradients_that_were_kept(gradients: bool, manage: Manage) -> None:
    """Biases are not saved for backward, so a graph of before the step is good for them."""

    def run(inside: Any) -> list[Any]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        layer.weight.requires_grad_(False)
        optimizer = torch.optim.SGD([layer.bias], lr=0.1, momentum=0.9)
        with inside(optimizer):
            for _ in range(3):
                first, second = (layer(torch.randn(2, 4)).square().sum() for _ in range(2))
                first.backward()
                optimizer.step()
                second.backward()
                optimizer.step()
            return [layer.bias.detach().clone(), layer.bias.grad]

    expected = run(lambda _: contextlib.nullcontext())
    options = {"optimizer_step": "deferred", "gradients": gradients}
    assert same(expected, run(lambda optimizer: manage(optimizer, **options)))


def test_a_state_dict_has_the_order_of_plain_pytorch(manage: Manage) -> None:
    """The parameters are used in another order than the groups have them."""
    training = begin(lambda parameters: torch.optim.AdamW(reversed(list(parameters))))
    with manage(training.optimizer, optimizer_step="deferred"):
        for _ in range(2):
            stepped(training, zeroes=True)
            stepped(training, zeroes=True)
            assert list(training.optimizer.state_dict()["state"]) == list(range(10))


def test_a_step_with_sparse_gradients_is_made_at_once_and_its_error_is_the_steps(manage: Manage) -> None:
    table = nn.Embedding(4, 8, sparse=True)
    optimizer = torch.optim.Adam(table.parameters())
    with manage(optimizer, optimizer_step="deferred"):
        table(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(VdnnError, match="Adam does not support sparse gradients"):
            optimizer.step()


def test_a_parameter_that_waits_is_stepped_before_it_is_swapped(manage: Manage) -> None:
    plain, training = begin(ADAMW), begin(ADAMW)
    stepped(plain, zeroes=True)
    with manage(training.optimizer, optimizer_step="deferred"):
        stepped(training, zeroes=True)
        other = nn.Parameter(torch.ones(12, 12))
        torch.utils.swap_tensors(weight(training), other)
        assert torch.equal(other, weight(plain))
        assert torch.equal(weight(training), torch.ones(12, 12))
        assert type(other) is type(weight(training)) is nn.Parameter


def test_torch_has_its_own_again_behind_the_last_session(manage: Manage) -> None:
    own = nn.Module.zero_grad
    training = begin(ADAMW)
    with manage(training.optimizer, optimizer_step="deferred"):
        stepped(training, zeroes=True)
        assert nn.Module.zero_grad is not own
    assert nn.Module.zero_grad is own
    assert "state" not in vars(torch.optim.Optimizer)
    assert "grad" not in vars(nn.Parameter)
    assert {type(one) for one in training.model.parameters()} == {nn.Parameter}
    assert state_of(training.optimizer).deferral is None
