"""The findings of torch's own checks in the places of a training step where a program's code runs.

`seen_in(loop)` runs a loop and returns, for each place, the results of all checks. A session must not change one. Other
tests may give a loop of their own, and read `CHECKS` at places of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHECKS: dict[str, Callable[[], object]] = {
    "function modes": torch._C._len_torch_function_stack,
    "dispatch modes": torch._C._len_torch_dispatch_stack,
    "has_torch_function of a tensor": lambda: torch.overrides.has_torch_function((torch.ones(1),)),
    "has_torch_function of a parameter": lambda: torch.overrides.has_torch_function((nn.Parameter(torch.ones(1)),)),
    "torch functions are off": torch._C._is_torch_function_all_disabled,
    "torch functions of subclasses": torch._C._is_torch_function_enabled,
    "is_fx_tracing": torch.fx._symbolic_trace.is_fx_tracing,
    "is_compiling": torch.compiler.is_compiling,
    "is_tracing": torch._C._get_tracing_state,
    "is_scripting": torch._jit_internal.is_scripting,
    "transforms": torch._C._functorch.maybe_current_level,
    "gradients": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "anomaly mode": torch.is_anomaly_enabled,
    "autocast": lambda: torch.is_autocast_enabled("cpu"),
    "autocast's cache": torch.is_autocast_cache_enabled,
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "threads": torch.get_num_threads,
    "forward level": lambda: torch.autograd.forward_ad._current_level,
    "MHA's fast path": torch.backends.mha.get_fastpath_enabled,
    "profiler": lambda: torch.autograd.profiler._is_profiler_enabled,
}


class _Places:
    """The checks at each place, in the order of the program."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, object]]] = []

    def note(self, place: str) -> None:
        self.seen.append((place, {name: check() for name, check in CHECKS.items()}))


class _Square(torch.autograd.Function):
    """An operation of the program."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: _Places) -> torch.Tensor:
        places.note("forward of a function")
        ctx.places = places
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.places.note("backward of a function")
        (x,) = ctx.saved_tensors
        return 2 * x * gradient, None


class _Noting(nn.Module):
    """A module of the program."""

    def __init__(self, places: _Places, width: int) -> None:
        super().__init__()
        self.places = [places]
        self.weight = nn.Parameter(torch.ones(width))
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (places,) = self.places
        places.note("forward of a module")
        squared: torch.Tensor = _Square.apply(self.inner(x), places)
        return squared * self.weight


class _OwnNorm(nn.Module):
    """A norm of the program, as nanoGPT has one."""

    def __init__(self, places: _Places, width: int) -> None:
        super().__init__()
        self.places = [places]
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.places[0].note("forward of a norm of the program")
        return functional.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class _SubNorm(nn.LayerNorm):
    """A subclass of torch's norm with a forward of its own."""

    places: list[_Places]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.places[0].note("forward of a subclass of torch's norm")
        return super().forward(x)


class _Steps(torch.optim.SGD):
    """An optimizer of the program."""

    places: list[_Places]

    def step(self, closure: Any = None) -> Any:
        self.places[0].note("step of an optimizer")
        return super().step(closure)


class Program:
    """A training with code of its own wherever torch lets a program have some."""

    def __init__(self, places: _Places, width: int = 8) -> None:
        torch.manual_seed(7)
        norm = _SubNorm(width)
        norm.places = [places]
        self.places = places
        first = nn.Linear(width, width)
        self.model = nn.Sequential(
            first, _Noting(places, width), norm, nn.GELU(), _OwnNorm(places, width), nn.Dropout(0.1)
        )
        self.x = torch.randn(4, width, requires_grad=True)
        self.optimizer = _Steps(self.model.parameters(), lr=0.01)
        self.optimizer.places = [places]
        first.register_forward_pre_hook(lambda *_: places.note("forward pre-hook"))
        first.register_forward_hook(lambda *_: places.note("forward hook"))
        first.register_full_backward_hook(lambda *_: places.note("backward hook of a module"))
        first.weight.register_hook(lambda _: places.note("hook of a gradient"))
        first.weight.register_post_accumulate_grad_hook(lambda _: places.note("behind a gradient"))
        self.optimizer.register_step_pre_hook(lambda *_: places.note("ahead of a step"))
        self.optimizer.register_step_post_hook(lambda *_: places.note("behind a step"))

    def step(self) -> None:
        places = self.places
        places.note("ahead of the forward pass")
        y = self.model(self.x)
        places.note("behind a model")
        y = checkpoint(self._recomputed, y, use_reentrant=False)
        loss = y.square().mean()
        loss.backward()
        places.note("behind a backward pass")
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            self.model(self.x)
        self.model.eval()(self.x)
        self.model.train()

    def _recomputed(self, y: torch.Tensor) -> torch.Tensor:
        self.places.note("in a checkpoint")
        return y.tanh()


def seen_in(session: Callable[[Program], AbstractContextManager[object]], steps: int) -> Iterator[tuple[str, Any]]:
    """The place and what the checks see there, over `steps` steps inside of the session."""
    places = _Places()
    program = Program(places)
    with session(program):
        for _ in range(steps):
            program.step()
    return iter(places.seen)


def differences(session: Callable[[Program], AbstractContextManager[object]], steps: int, plain: Any) -> set[str]:
    """The places and checks where a session changes what torch sees. `plain` is the same without one."""
    found = set()
    for (place, seen), (other, expected) in zip(seen_in(session, steps), seen_in(plain, steps), strict=True):
        assert place == other
        found |= {f"{name} in the {place}" for name, value in seen.items() if value != expected[name]}
    return found
