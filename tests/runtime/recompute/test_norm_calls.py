"""The arguments of norms that their nodes lack, read from the frames of their calls: the right ones, or none."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from vdnn import _C
from vdnn.runtime.recompute import observe_flags_at_save
from vdnn.runtime.recompute.node_notes import EPS, NO_BIAS

Tensor = torch.Tensor
Facts = dict[str, object]
_EPS = 1e-2
_UNKNOWN = object()


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Notes the calls of norms as a session does."""

    def pack(tensor: Tensor) -> Tensor:
        observe_flags_at_save(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def facts_behind(output: Tensor) -> Facts:
    """The facts of the norm behind a tensor."""
    node: Any = output.grad_fn
    while "NormBackward" not in node.name():
        node = node.next_functions[0][0]
    facts = {name: _C.fact_of_norm(node, name, _UNKNOWN) for name in (EPS, NO_BIAS)}
    return {name: fact for name, fact in facts.items() if fact is not _UNKNOWN}


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


CALLS: dict[str, tuple[Callable[[], Any], tuple[int, ...], Facts]] = {
    "layer norm": (lambda: nn.LayerNorm(6, eps=_EPS), (4, 6), {EPS: _EPS}),
    "layer norm without bias": (lambda: nn.LayerNorm(6, eps=_EPS, bias=False), (4, 6), {EPS: _EPS}),
    "layer norm without parameters": (
        lambda: nn.LayerNorm((3, 6), eps=_EPS, elementwise_affine=False),
        (4, 3, 6),
        {EPS: _EPS},
    ),
    "layer norm with a whole number": (lambda: nn.LayerNorm(6, eps=1), (4, 6), {EPS: 1.0}),
    "group norm": (lambda: nn.GroupNorm(2, 6, eps=_EPS), (4, 6, 3), {EPS: _EPS, NO_BIAS: False}),
    "group norm without parameters": (
        lambda: nn.GroupNorm(2, 6, eps=_EPS, affine=False),
        (4, 6, 3),
        {EPS: _EPS, NO_BIAS: True},
    ),
    "batch norm of vectors": (lambda: nn.BatchNorm1d(6), (4, 6), {NO_BIAS: False}),
    "batch norm": (lambda: nn.BatchNorm2d(6), (4, 6, 3, 2), {NO_BIAS: False}),
    "batch norm of volumes": (lambda: nn.BatchNorm3d(6), (4, 6, 3, 2, 2), {NO_BIAS: False}),
    "batch norm without parameters": (lambda: nn.BatchNorm2d(6, affine=False), (4, 6, 3, 2), {NO_BIAS: True}),
    "batch norm without statistics": (
        lambda: nn.BatchNorm2d(6, track_running_stats=False),
        (4, 6, 3, 2),
        {NO_BIAS: False},
    ),
    "batch norm with a cumulative average": (lambda: nn.BatchNorm2d(6, momentum=None), (4, 6, 3, 2), {NO_BIAS: False}),
    "batch norm in evaluation": (lambda: nn.BatchNorm2d(6).eval(), (4, 6, 3, 2), {NO_BIAS: False}),
    "frozen layer norm": (lambda: nn.LayerNorm(6, eps=_EPS).requires_grad_(False), (4, 6), {EPS: _EPS}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_call_of_a_norm_gives_what_its_node_lacks(name: str) -> None:
    make, shape, facts = CALLS[name]
    module, x = make(), inputs(*shape)
    with noting():
        made = module(x)
        assert facts_behind(made) == facts
        with torch.autocast("cpu"):
            assert facts_behind(module(x)) == facts
        with torch.device("cpu"):  # a function mode of torch, which passes the arguments on
            assert facts_behind(module(x)) == facts
            with torch.device("cpu"):
                assert facts_behind(module(x)) == facts
    assert facts_behind(made) == facts


@pytest.mark.parametrize("eps", [None, _EPS])
def test_a_norm_that_torch_writes_out_gives_nothing(eps: float | None) -> None:
    """Torch writes RMS norm out on the CPU."""
    with noting():
        made = nn.RMSNorm(6, eps=eps)(inputs(4, 6))
    for name in (EPS, NO_BIAS):
        assert _C.fact_of_norm(made.grad_fn, name, _UNKNOWN) is _UNKNOWN


# Calls with another eps than the attribute of the module. Each gives a module, its arguments, and a context for the
# call, which uses _EPS. The attribute is another one before or after it.

_OTHER = 0.5
Liar = Callable[[pytest.MonkeyPatch], tuple[nn.Module, tuple[Any, ...], Any]]


def _layer(eps: float = _OTHER) -> Any:
    return nn.LayerNorm(6, eps=eps)


def _by_functional(module: Any, x: Tensor) -> Tensor:
    return torch.layer_norm(x, (6,), module.weight, module.bias, _EPS)


def _subclass(patch: pytest.MonkeyPatch) -> Any:
    class Norm(nn.LayerNorm):
        forward = _by_functional

    return Norm(6, eps=_OTHER), (inputs(4, 6),), None


def _own_forward(patch: pytest.MonkeyPatch) -> Any:
    module = _layer()
    module.forward = lambda x: _by_functional(module, x)
    return module, (inputs(4, 6),), None


def _patched_class(patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(nn.LayerNorm, "forward", _by_functional)
    return _layer(), (inputs(4, 6),), None


def _patched_function(patch: pytest.MonkeyPatch) -> Any:
    own = functional.layer_norm
    patch.setattr(functional, "layer_norm", lambda x, shape, weight, bias, eps: own(x, shape, weight, bias, _EPS))
    return _layer(), (inputs(4, 6),), None


def _patched_operation(patch: pytest.MonkeyPatch) -> Any:
    own = torch.layer_norm
    patch.setattr(torch, "layer_norm", lambda x, shape, weight, bias, eps, cudnn: own(x, shape, weight, bias, _EPS))
    return _layer(), (inputs(4, 6),), None


def _patched_module_of_functions(patch: pytest.MonkeyPatch) -> Any:
    class Functions:
        @staticmethod
        def layer_norm(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
            return torch.layer_norm(x, shape, weight, bias, _EPS)

    patch.setattr(sys.modules["torch.nn.modules.normalization"], "F", Functions)
    return _layer(), (inputs(4, 6),), None


def _hooked(patch: pytest.MonkeyPatch) -> Any:
    """The module's own hooks change the attribute and set it back."""
    module = _layer()
    module.register_forward_pre_hook(lambda module, args: setattr(module, "eps", _EPS))
    module.register_forward_hook(lambda module, args, output: setattr(module, "eps", _OTHER))
    return module, (inputs(4, 6),), None


@contextlib.contextmanager
def _global_hooks() -> Iterator[None]:
    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(lambda module, args: setattr(module, "eps", _EPS)),
        hooks.register_module_forward_hook(lambda module, args, output: setattr(module, "eps", _OTHER)),
    ]
    hooks._global_forward_hooks.move_to_end(handles[1].id, last=False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _globally_hooked(patch: pytest.MonkeyPatch) -> Any:
    return _layer(), (inputs(4, 6),), _global_hooks


class _OtherEpsOfSubclass(Tensor):
    """A tensor for which layer norm uses another eps."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is functional.layer_norm:
                return functional.layer_norm(args[0], (6,), kwargs["weight"], kwargs["bias"], _EPS)
            return func(*args, **(kwargs or {}))


def _subclass_of_tensor(patch: pytest.MonkeyPatch) -> Any:
    return _layer(), (inputs(4, 6).as_subclass(_OtherEpsOfSubclass),), None


def _subclass_of_weight(patch: pytest.MonkeyPatch) -> Any:
    module = _layer()
    del module.weight
    module.weight = torch.ones(6).as_subclass(_OtherEpsOfSubclass)  # an attribute, as it is not a parameter
    return module, (inputs(4, 6),), None


def _subclass_as_buffer(patch: pytest.MonkeyPatch) -> Any:
    module = _layer()
    del module.weight
    module.register_buffer("weight", torch.ones(6).as_subclass(_OtherEpsOfSubclass))
    return module, (inputs(4, 6),), None


class _OtherEpsInMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.layer_norm:
            return functional.layer_norm(args[0], (6,), kwargs["weight"], kwargs["bias"], _EPS)
        return func(*args, **(kwargs or {}))


def _in_a_mode(patch: pytest.MonkeyPatch) -> Any:
    return _layer(), (inputs(4, 6),), _OtherEpsInMode


class _AttributeByProperty:
    def __get__(self, module: Any, kind: Any) -> float:
        return _EPS

    def __set__(self, module: Any, value: float) -> None:
        module.__dict__["eps"] = value


def _property(patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(nn.LayerNorm, "eps", _AttributeByProperty(), raising=False)
    return _layer(), (inputs(4, 6),), None


def _number_of_numpy(patch: pytest.MonkeyPatch) -> Any:
    return _layer(np.float64(_EPS)), (inputs(4, 6),), None  # type: ignore[arg-type]


@contextlib.contextmanager
def _changed_by_saves(module: nn.Module, **attributes: object) -> Iterator[None]:
    """Changes attributes while the operation runs."""

    def pack(tensor: Tensor) -> Tensor:
        for name, value in attributes.items():
            setattr(module, name, value)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _changed_meanwhile(patch: pytest.MonkeyPatch) -> Any:
    module = _layer(_EPS)
    return module, (inputs(4, 6),), lambda: _changed_by_saves(module, eps=_OTHER)


LIARS: dict[str, Liar] = {
    "a subclass": _subclass,
    "a forward of its own": _own_forward,
    "a patched class": _patched_class,
    "a patched function": _patched_function,
    "a patched operation": _patched_operation,
    "a patched module of functions": _patched_module_of_functions,
    "hooks of the module": _hooked,
    "global hooks": _globally_hooked,
    "a tensor subclass": _subclass_of_tensor,
    "a tensor subclass as the weight": _subclass_of_weight,
    "a tensor subclass as a buffer": _subclass_as_buffer,
    "a function mode": _in_a_mode,
    "a property": _property,
    "a number of numpy": _number_of_numpy,
    "a change while the operation runs": _changed_meanwhile,
}


@pytest.mark.parametrize("liar", LIARS.values(), ids=LIARS)
def test_the_eps_is_that_of_the_call_and_not_that_of_the_module(liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    module, arguments, around = liar(monkeypatch)
    with noting(), (around or contextlib.nullcontext)():
        made = module(*arguments)
    monkeypatch.undo()
    plain = torch.Tensor.as_subclass
    x, made = plain(arguments[0], Tensor), plain(made, Tensor)
    expected = functional.layer_norm(x, (6,), eps=_EPS)
    assert torch.equal(made, expected)
    is_hidden = liar in (_subclass, _own_forward, _patched_class, _patched_operation, _patched_module_of_functions)
    assert facts_behind(made) == ({} if is_hidden or liar is _changed_meanwhile else {EPS: _EPS})


def _without_bias_in_parameters(patch: pytest.MonkeyPatch) -> Any:
    module: Any = nn.BatchNorm2d(6)
    module._parameters["bias"] = None
    module.__dict__["bias"] = torch.ones(6)
    return module, (inputs(4, 6, 3, 2),), None


def _parametrized(patch: pytest.MonkeyPatch) -> Any:
    module: Any = nn.BatchNorm2d(6)
    parametrize.register_parametrization(module, "bias", nn.Identity())
    return module, (inputs(4, 6, 3, 2),), None


def _bias_by_property(patch: pytest.MonkeyPatch) -> Any:
    module: Any = nn.BatchNorm2d(6, affine=False)
    patch.setattr(nn.BatchNorm2d, "bias", property(lambda self: torch.ones(6)), raising=False)
    return module, (inputs(4, 6, 3, 2),), None


def _bias_in_buffers(patch: pytest.MonkeyPatch) -> Any:
    module: Any = nn.GroupNorm(2, 6, affine=False)
    del module._parameters["bias"]
    module.register_buffer("bias", torch.ones(6))
    return module, (inputs(4, 6, 3, 2),), None


def _bias_that_goes(patch: pytest.MonkeyPatch) -> Any:
    module: Any = nn.BatchNorm2d(6)
    nn.init.ones_(module.bias)
    module.requires_grad_(False)
    return module, (inputs(4, 6, 3, 2),), lambda: _changed_by_saves(module, bias=None)


BIASES: dict[str, Liar] = {
    "an attribute in front of the parameter": _without_bias_in_parameters,
    "a parametrization": _parametrized,
    "a property": _bias_by_property,
    "a buffer": _bias_in_buffers,
    "a bias that goes while the operation runs": _bias_that_goes,
}


@pytest.mark.parametrize("liar", BIASES.values(), ids=BIASES)
def test_a_bias_that_the_parameters_may_not_tell_is_not_taken_for_missing(
    liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, arguments, around = liar(monkeypatch)
    with noting(), (around or contextlib.nullcontext)():
        made = module(*arguments)
    assert facts_behind(made).get(NO_BIAS, False) is False


def test_a_call_with_keywords_or_under_a_dispatch_mode_gives_the_same() -> None:
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    module, x = _layer(_EPS), inputs(4, 6)
    with noting():
        assert facts_behind(module(input=x)) == {EPS: _EPS}
        with Passing():
            assert facts_behind(module(x)) == {EPS: _EPS}
        torch.func.vmap(module)(x.detach())


def test_a_function_of_the_program_gives_its_call_too() -> None:
    x = inputs(4, 6)
    with noting():
        assert facts_behind(functional.layer_norm(x, (6,), eps=_EPS)) == {EPS: _EPS}
        assert facts_behind(functional.group_norm(x, 2, torch.ones(6), eps=_EPS)) == {EPS: _EPS, NO_BIAS: True}


def test_a_call_of_the_native_function_gives_nothing() -> None:
    with noting():
        assert facts_behind(torch.layer_norm(inputs(4, 6), (6,), eps=_EPS)) == {}


def test_a_function_between_torchs_own_and_the_operation_hides_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.layer_norm

    def other(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float, cudnn: bool) -> Tensor:
        return own(x, shape, weight, bias, _OTHER)

    monkeypatch.setattr(torch, "layer_norm", other)
    with noting():
        assert facts_behind(functional.layer_norm(inputs(4, 6), (6,), eps=_EPS)) == {}


def test_a_node_of_another_thread_is_not_taken_for_one_of_the_same_number() -> None:
    x, made = inputs(4, 6), list[Tensor]()

    def other_thread() -> None:
        with noting():
            for _ in range(50):
                made.append(functional.layer_norm(x.neg(), (6,), eps=0.1))
            assert all(facts_behind(one) == {EPS: 0.1} for one in made[-50:])

    threads = [threading.Thread(target=other_thread) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    numbers = [one.grad_fn._sequence_nr() for one in made]  # type: ignore[union-attr]
    assert numbers[:50] == numbers[50:], "nodes of threads are numbered apart"
    last, found = list[Tensor](), list[Facts]()

    def third_thread() -> None:
        with noting():
            last.extend(functional.layer_norm(x.neg(), (6,), eps=_EPS) for _ in range(50))
        found.extend(map(facts_behind, made))

    thread = threading.Thread(target=third_thread)
    thread.start()
    thread.join()
    assert [one.grad_fn._sequence_nr() for one in last] == numbers[:50]  # type: ignore[union-attr]
    assert found == [{}] * 100


def test_what_an_earlier_node_noted_is_not_taken_for_that_of_a_later_one() -> None:
    x = inputs(4, 6)
    with noting():
        first = functional.layer_norm(x, (6,), eps=_EPS)
        assert facts_behind(first) == {EPS: _EPS}
        for _ in range(1 << 12):  # as many nodes as are remembered
            functional.group_norm(x, 2, eps=_OTHER)
    assert facts_behind(first) == {}


def test_a_norm_whose_call_fails_leaves_nothing_behind() -> None:
    module, x = nn.GroupNorm(2, 6, eps=_EPS), inputs(4, 6)
    with noting():
        with pytest.raises(RuntimeError, match="channels"):
            module(inputs(4, 5))
        assert facts_behind(torch.group_norm(x, 2, eps=0.1)) == {}
        assert facts_behind(module(x)) == {EPS: _EPS, NO_BIAS: False}


def test_only_exact_parts_are_watched() -> None:
    for norms in ((1,), (("layer_norm", frozenset(), True, True),)):
        with pytest.raises(TypeError):
            _C.watch_norm_calls(norms, (), "")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _C.fact_of_norm(None, EPS)  # type: ignore[call-arg]
