"""Settings of torch that choose kernels, and change between forward and backward or around one operation.

Results are those of plain torch in every mode. A recompute restores the settings that it changes, even if it is
interrupted.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.runtime.recompute.saving import Saving, operation_names
from tests.runtime.unusual.every_mode import MODES, Step, assert_same_in
from tests.runtime.unusual.small_networks import steps_on
from vdnn.runtime.recompute import observe
from vdnn.runtime.recompute.backend_flags import Flags, backend_flags, changes_to

pytestmark = pytest.mark.slow

Tensor = torch.Tensor
Setting = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def _set(setter: Callable[[Any], Any], value: object, back: object) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(back)


def _precision(backend: str, operation: str, value: str) -> Setting:
    setter, getter = torch._C._set_fp32_precision_setter, torch._C._get_fp32_precision_getter

    def toggled() -> contextlib.AbstractContextManager[None]:
        return _set(lambda one: setter(backend, operation, one), value, getter(backend, operation))

    return toggled


def _deterministic() -> contextlib.AbstractContextManager[None]:
    return _set(torch.use_deterministic_algorithms, True, False)


def _cudnn(**flags: bool) -> Setting:
    return lambda: torch.backends.cudnn.flags(**flags)


def _mkldnn_off() -> contextlib.AbstractContextManager[None]:
    """Replaces torch.backends.mkldnn.flags, which warns on builds for the CPU."""
    return _set(torch._C._set_mkldnn_enabled, False, True)


_THREADS = torch.get_num_threads()
SETTINGS: dict[str, Setting] = {
    "mkldnn off": _mkldnn_off,
    "float32_matmul_precision": lambda: _set(torch.set_float32_matmul_precision, "medium", "highest"),
    "deterministic": _deterministic,
    "cudnn off": _cudnn(enabled=False),
    "cudnn.benchmark": _cudnn(enabled=True, benchmark=True),
    "cudnn.deterministic": _cudnn(enabled=True, deterministic=True),
    "num_threads": lambda: _set(torch.set_num_threads, _THREADS + 2, _THREADS),
    "flush_denormal": lambda: _set(torch.set_flush_denormal, True, False),
    "nnpack off": lambda: torch.backends.nnpack.flags(enabled=False),
    "default dtype": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "the precision of one backend": _precision("mkldnn", "matmul", "bf16"),
    "the precision of all": _precision("generic", "all", "tf32"),
}


def _convolutions(setting: Setting, only: int | None = None) -> Callable[[], Step]:
    """Convolutions and a product. The setting is active in the whole forward, or around convolution number `only`, but
    never in the backward. Values become denormal in later steps."""

    def around(place: int | None) -> contextlib.AbstractContextManager[None]:
        return setting() if place == only else contextlib.nullcontext()

    def factory() -> Step:
        layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        head = nn.Linear(64, 16)
        inputs = torch.randn(16, 4, 8, 8)

        def loss_of(index: int) -> Tensor:
            made = inputs.roll(index) * (1.0 if index < 5 else 1e-38)
            with around(None):
                for place, layer in enumerate(layers):
                    with around(place):
                        made = layer(made)
                    made = functional.gelu(made) + made.sigmoid()
                made = head(made.view(-1, 64)).softmax(-1)
                return (made.exp() * made.sin()).sum()

        return steps_on(loss_of, layers, head)

    return factory


@pytest.mark.drawn(of=3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_around_the_forward_only_changes_no_bit(name: str, mode: str) -> None:
    with SETTINGS[name]():
        pass  # a first run: torch.set_float32_matmul_precision sets more than it can restore
    before = backend_flags()
    assert_same_in(mode, _convolutions(SETTINGS[name]))
    assert backend_flags() == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mkldnn off", "flush_denormal", "float32_matmul_precision"])
def test_a_setting_around_one_operation_only_changes_no_bit(name: str, mode: str) -> None:
    assert_same_in(mode, _convolutions(SETTINGS[name], only=2))


def _recipe_under(setting: Setting) -> tuple[Any, Tensor, Saving]:
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    layer = nn.Conv2d(4, 4, 3)
    observe(x)
    with Saving() as saving:
        with setting():
            made = layer(x)
        saved = made * torch.ones((), requires_grad=True)
    assert saving.failures == []
    del saved
    return saving.recipes[-1], made.detach(), saving


@pytest.mark.parametrize("name", SETTINGS)
def test_a_recipe_runs_under_the_settings_of_its_operation(name: str) -> None:
    seen: list[Flags] = []
    with SETTINGS[name]():
        wanted = backend_flags()
    before = backend_flags()
    assert wanted != before
    recipe, _, saving = _recipe_under(SETTINGS[name])
    assert recipe.name == "convolution"
    assert recipe.template.flags == wanted
    run = torch.convolution
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "convolution", lambda *args: seen.append(backend_flags()) or run(*args))
        recipe.recompute(saving.unpack)
    assert seen == [wanted]
    assert backend_flags() == before


def test_a_chain_of_operations_under_different_settings_has_no_recipe() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    observe(x)
    with Saving() as saving:
        with _mkldnn_off():
            made = x.exp() @ x
        made = (made @ x).neg()
        before = len(saving.recipes)
        made * torch.ones((), requires_grad=True)
    assert [recipe.name for recipe in saving.recipes[before:]] == ["neg <- mm"]
    assert saving.recipes[-1].template.flags == backend_flags()


@pytest.mark.parametrize("inner", [_mkldnn_off, contextlib.nullcontext], ids=["different", "the same"])
def test_products_of_which_none_saves_the_other_have_a_recipe_only_under_the_same_settings(inner: Any) -> None:
    """Each saves the constant alone, so a recipe would have to run both."""
    x, constant = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    observe(x)
    with Saving() as saving:
        with inner():
            made = x.exp() @ constant
        made = (made @ constant).neg()
        before = len(saving.recipes)
        made * torch.ones((), requires_grad=True)
    found = [operation_names(recipe) for recipe in saving.recipes[before:]]
    assert found == ([] if inner is _mkldnn_off else [("mm", "mm", "neg")])


def test_precisions_that_were_inherited_are_inherited_again() -> None:
    setter, getter = torch._C._set_fp32_precision_setter, torch._C._get_fp32_precision_getter
    before = backend_flags()
    setter("cuda", "matmul", "none")  # torch.set_float32_matmul_precision may have set this
    setter("generic", "all", "tf32")
    try:
        wanted = list(backend_flags())
        wanted[-5] = "ieee"  # products on CUDA
        make, back = changes_to(tuple(wanted))
        for change in (*make, *back):
            change()
        assert getter("cuda", "matmul") == "tf32"
        setter("generic", "all", "ieee")
        assert getter("cuda", "matmul") == "ieee"
    finally:
        setter("generic", "all", "none")
        setter("cuda", "matmul", before[-5])


def test_settings_are_read_where_torchs_older_switches_raise() -> None:
    before = backend_flags()
    with _precision("cuda", "matmul", "tf32")():
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        wanted = backend_flags()
        assert wanted != before
        for change in changes_to(before)[0]:
            change()
        assert torch.backends.cuda.matmul.fp32_precision != "tf32"
    assert backend_flags() == before


class _Interrupts:
    """Raises KeyboardInterrupt at opcode number `at` of those that run in `package`."""

    def __init__(self, at: int, package: str) -> None:
        self._left = at
        self._package = package

    @property
    def has_fired(self) -> bool:
        return self._left < 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if self._package not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and self._left >= 0:
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt
        return self


def _state() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._get_torch_function_state(),
        torch._C._len_torch_function_stack(),
        backend_flags(),
    )


def test_an_interrupt_at_any_instruction_of_a_recompute_leaves_torch_as_it_was() -> None:
    recipe, made, saving = _recipe_under(SETTINGS["mkldnn off"])
    at = 0
    with torch.autocast("cpu"):
        before = _state()
        while True:
            interrupts = _Interrupts(at, "/recompute/")
            sys.settrace(interrupts)
            try:
                recomputed = recipe.recompute(saving.unpack)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            assert _state() == before, at
            if not interrupts.has_fired:
                break
            at += 1
    assert at > 200
    assert torch.equal(recomputed, made)
