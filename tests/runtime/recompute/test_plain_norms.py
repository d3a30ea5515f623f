"""Facts of norms that are read from a module's attributes, without a function mode: only where no other value can have
been passed."""

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
from vdnn.runtime.recompute import NormWatch
from vdnn.runtime.recompute.backend_flags import torch_settings
from vdnn.runtime.recompute.node_notes import EPS, NO_BIAS, key_of_note
from vdnn.runtime.recompute.norm_calls import _NORM_NODES, plain_norms
from vdnn.runtime.torch_internals.module_watch import NORMS, MarkedModules, ModuleWatch

Tensor = torch.Tensor
Facts = dict[str, object]
_EPS = 1e-2


@contextlib.contextmanager
def noting(more: Callable[[], Any] = contextlib.nullcontext) -> Iterator[list[nn.Module]]:
    """Notes the facts of norms as a session does. Yields the norms that Python watches."""
    watch, norms, watched = ModuleWatch(MarkedModules()), NormWatch(), list[nn.Module]()

    def before(module: nn.Module, facts: int) -> None:
        if facts & NORMS and "Norm" in type(module).__name__:
            watched.append(module)
            norms.enter(module)

    watch.running.note(before, lambda module, output: norms.leave(module), torch_settings, plain_norms, None)
    remove = watch.install()
    yield watched
    remove()
    watch.running.note_nothing()
    norms.remove()


def facts_behind(output: Tensor) -> Facts:
    """The facts on the node of the norm behind a tensor."""
    node: Any = output.grad_fn
    while node.name() not in _NORM_NODES:
        node = node.next_functions[0][0]
    names = {key_of_note(one): one for one in (EPS, NO_BIAS)}
    return {names[key]: value for key, value in node.metadata.items() if key in names}


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
def test_the_attributes_of_a_plain_norm_give_the_facts_that_its_call_gives(name: str) -> None:
    make, shape, facts = CALLS[name]
    module, x = make(), inputs(*shape)
    with noting() as watched:
        made = module(x)
        assert watched == []
        assert facts_behind(made) == facts
        with torch.autocast("cpu"):
            assert facts_behind(module(x)) == facts
        assert watched == []
        with torch.device("cpu"):  # a function mode: Python watches the call
            assert facts_behind(module(x)) == facts
        assert watched == [module]
        assert _C.maker_of_norm(made.grad_fn._sequence_nr()) == id(module)
        assert _C.maker_of_norm(x.exp().grad_fn._sequence_nr()) is None  # type: ignore[union-attr]


@pytest.mark.parametrize("eps", [None, _EPS])
def test_a_plain_norm_without_a_node_of_its_own_notes_nothing(eps: float | None) -> None:
    """Torch writes RMS norm out on the CPU."""
    before, x = nn.GroupNorm(2, 6, eps=0.1), inputs(4, 6)
    with noting() as watched:
        first = before(x)
        for input in (first, x):
            nn.RMSNorm(6, eps=eps, elementwise_affine=False)(input)
        assert watched == []
    assert facts_behind(first) == {EPS: 0.1, NO_BIAS: False}


def test_the_call_of_a_plain_norm_runs_no_python_of_its_own() -> None:
    called: list[str] = []
    module, x = nn.LayerNorm(6), inputs(4, 6)
    with noting():
        module(x)
        sys.setprofile(
            lambda frame, event, argument: (
                called.append(frame.f_code.co_name)
                if event == "call" and "/vdnn/" in frame.f_code.co_filename
                else None
            )
        )
        try:
            module(x)
        finally:
            sys.setprofile(None)
    assert called == ["_enter_module", "_leave_module"]


# Calls that may pass another eps than the attribute. Each gives a module, its arguments, and a context for the call,
# which uses _EPS. The attribute is another one before or after it.

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
def test_an_eps_that_the_attribute_may_not_tell_is_not_taken_from_there(
    liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, arguments, around = liar(monkeypatch)
    with noting() as watched, (around or contextlib.nullcontext)():
        made = module(*arguments)
    monkeypatch.undo()
    plain = torch.Tensor.as_subclass
    x, made = plain(arguments[0], Tensor), plain(made, Tensor)
    expected = functional.layer_norm(x, (6,), eps=_EPS)
    assert torch.equal(made, expected)
    assert facts_behind(made).get(EPS, _EPS) == _EPS
    assert watched == ([] if liar is _changed_meanwhile else [module])


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


def test_a_call_with_keywords_or_under_a_dispatch_mode_is_watched() -> None:
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    module, x = _layer(_EPS), inputs(4, 6)
    with noting() as watched:
        assert facts_behind(module(input=x)) == {EPS: _EPS}
        with Passing():
            assert facts_behind(module(x)) == {EPS: _EPS}
        torch.func.vmap(module)(x.detach())
        assert watched == [module, module, module]


@pytest.mark.parametrize("is_watched", [False, True], ids=["plain", "watched"])
def test_a_norm_of_another_thread_ahead_of_a_module_gets_no_facts_of_it(is_watched: bool) -> None:
    """Nodes of threads are numbered apart, so its number may look as if the module's call had made it."""
    x, made = inputs(4, 6), list[Tensor]()

    def other_thread() -> None:
        for _ in range(50_000):
            last = x.neg()
        made.append(functional.layer_norm(last, (6,), eps=0.1))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    with noting() as watched, torch.device("cpu") if is_watched else contextlib.nullcontext():
        nn.RMSNorm(6, eps=_EPS)(made[0])
        assert len(watched) == is_watched
    assert facts_behind(made[0]) == {}


def test_a_norm_whose_call_fails_leaves_nothing_behind() -> None:
    module, x = nn.GroupNorm(2, 6, eps=_EPS), inputs(4, 6)
    with noting() as watched:
        with pytest.raises(RuntimeError, match="channels"):
            module(inputs(4, 5))
        made = functional.group_norm(x, 2, eps=0.1)
        assert facts_behind(made) == {}
        assert facts_behind(module(x)) == {EPS: _EPS, NO_BIAS: False}
        assert watched == []


def test_a_call_that_an_interrupt_ended_is_not_taken_for_the_next_one_of_its_module() -> None:
    def interrupt(tensor: Tensor) -> Tensor:
        raise KeyboardInterrupt

    module, x = _layer(), inputs(4, 6)
    with noting() as watched:
        with (
            pytest.raises(KeyboardInterrupt),
            torch.autograd.graph.saved_tensors_hooks(interrupt, lambda tensor: tensor),
        ):
            module(x)
        module.register_forward_pre_hook(lambda module, args: setattr(module, "eps", _EPS))
        assert facts_behind(module(x)) == {EPS: _EPS}
        assert watched == [module]
        assert torch._C._len_torch_function_stack() == 0


def test_only_exact_parts_make_plain_norms() -> None:
    with pytest.raises(TypeError):
        _C.PlainNorms()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="expected the parts of plain norms"):
        _C.PlainNorms((), (), ([],), (), frozenset(), torch.Tensor.grad_fn)  # type: ignore[arg-type]
