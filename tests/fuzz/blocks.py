"""Blocks of the grammar: flags, autocast, checkpoints, grad mode, and the network that owns a part's parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint

from tests.fuzz.grammar import statement
from tests.fuzz.program import INPUT, Statement

if TYPE_CHECKING:
    from tests.fuzz.world import World

Run = Callable[[], None]


@statement("network")
def _network(world: World, one: Statement) -> Run:
    world.part = one.args[0]
    runs = [world.compiled(inner) for inner in one.body]
    return lambda: _all(runs)


def _all(runs: list[Run]) -> None:
    for run in runs:
        run()


@contextlib.contextmanager
def _changed(get: Callable[[], Any], change: Callable[[Any], object], to: Any) -> Iterator[None]:
    before = get()
    change(to)
    try:
        yield
    finally:
        change(before)


@contextlib.contextmanager
def _denormals_flushed() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _cudnn(name: str, to: bool) -> Any:
    backend = torch.backends.cudnn
    return _changed(lambda: getattr(backend, name), lambda value: setattr(backend, name, value), to)


_FLAGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "matmul_precision": lambda: _changed(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "deterministic": lambda: _changed(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "cudnn.benchmark": lambda: _cudnn("benchmark", True),
    "cudnn.deterministic": lambda: _cudnn("deterministic", True),
    "cudnn.enabled": lambda: _cudnn("enabled", False),
    "flush_denormal": _denormals_flushed,
    "math_attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "default_dtype": lambda: _changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
}
_LIKELY = ["mkldnn", "mkldnn", "mkldnn", "flush_denormal", "flush_denormal", "matmul_precision"]


def draw_flag(random: Random) -> tuple[Any, ...]:
    return (random.choice([*_FLAGS, *_LIKELY]),)


@statement("flags_around", draw_flag)
def _flags_around(world: World, one: Statement) -> Run:
    runs = [world.compiled(inner) for inner in one.body]
    around = _FLAGS[one.args[0]]

    def run() -> None:
        with around():
            _all(runs)

    return run


@statement("autocast")
def _autocast(world: World, one: Statement) -> Run:
    """Casts the results back to float32, so that shapes and types fit."""
    runs = [world.compiled(inner) for inner in one.body]
    made = [inner.out for inner in one.body if inner.out > INPUT]

    def run() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _all(runs)
        for slot in made:
            found = world.values.get(slot)
            if found is not None and found.dtype == torch.bfloat16:
                world.values[slot] = found.float()

    return run


@statement("no_grad")
def _no_grad(world: World, one: Statement) -> Run:
    runs = [world.compiled(inner) for inner in one.body]

    def run() -> None:
        with torch.no_grad():
            _all(runs)

    return run


@statement("checkpoint", lambda random: (random.random() < 0.6,))
def _checkpoint(world: World, one: Statement) -> Run:
    """Checkpoints a body that maps one value to one value. The body has slots of its own."""
    runs = [world.compiled(inner) for inner in one.body]
    start, last, (reentrant,) = one.ins[0], max((inner.out for inner in one.body), default=INPUT), one.args

    def apply(x: torch.Tensor) -> torch.Tensor:
        outside = world.values
        world.values = {INPUT: x, start: x}
        try:
            _all(runs)
            return world.value(last)
        finally:
            world.values = outside

    def run() -> None:
        x = world.value(start)
        world.values[one.out] = checkpoint.checkpoint(apply, x, use_reentrant=reentrant)

    return run
