"""The settings of torch that choose kernels or change results: read all at once, and set for a recompute.

Each setting is read by a C function, if this version of torch has it. vdnn._C.TorchSettings calls these functions, and
remembers under which settings operations ran. The legacy TF32 getters are not read: they raise after the precision of a
single backend was set, and kernels do not read them. `changes_to` returns how to set earlier values and how to restore
the present ones. This module never initializes CUDA.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from vdnn._C import TorchSettings, flushes_denormals
from vdnn.errors import VdnnError

_C = torch._C
Flags = tuple[object, ...]
Change = Callable[[], object]


class _Setting(NamedTuple):
    """`otherwise` is the value where `get` raises RuntimeError; None if it does not."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    otherwise: str | None = None


# [Note: Resolved precisions] An operation whose precision is not set inherits its backend's, and a backend that of
# "generic". Getters return the precision that applies, not the one that was set.
_PRECISIONS = (
    ("generic", "all"),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv")),
)
_get_precision: Any = _C._get_fp32_precision_getter
_set_precision: Any = _C._set_fp32_precision_setter


def _set_deterministic(is_on: bool) -> None:
    _C._set_deterministic_algorithms(is_on, warn_only=_C._get_deterministic_algorithms_warn_only())


def _set_warn_only(is_on: bool) -> None:
    _C._set_deterministic_algorithms(_C._get_deterministic_algorithms(), warn_only=is_on)


# [Note: Two settings of one precision] torch.set_float32_matmul_precision sets a value of its own and the precisions of
# two backends. Matrix products raise if these contradict. So it is set first, and then only the precisions that differ.
_MIXED = "set for single backends"


def _set_matmul_precision(value: str) -> None:
    if value != _MIXED:
        _C._set_float32_matmul_precision(value)


def _spread(setter: Any) -> Callable[[Any], Any]:
    """Wrap a setter that newer versions of torch give two booleans."""
    return lambda value: setter(*value) if isinstance(value, tuple) else setter(value)


def _writes_list(setter: Any) -> Callable[[Any], Any]:
    return lambda value: setter(list(value))


def _named() -> list[tuple[str, str]]:
    """The names of getters and setters of torch._C."""
    same = (
        *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cudnn_depthwise_kernel"),
        *("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled", "miopen_immediate"),
        *("cublas_allow_fp16_accumulation", "cpu_allow_fp16_reduced_precision_reduction"),
        *("math_sdp_allow_fp16_bf16_reduction", "sm_carveout_experimental"),
        *(("blas_preferred_backend",) if _C._has_cuda else ()),  # a pybind enum: slow to compare
        *(("rocm_fa_preferred_backend",) if torch.version.hip else ()),
    )
    kinds = ("math", "flash", "mem_efficient", "cudnn", "overrideable", "fa3")
    return [
        *((f"_get_{name}", f"_set_{name}") for name in same),
        *((f"_get_{kind}_sdp_enabled", f"_set_sdp_use_{kind}") for kind in kinds),
        ("get_num_threads", "set_num_threads"),
        ("get_default_dtype", "_set_default_dtype"),
    ]


def _settings() -> tuple[_Setting, ...]:
    found = [
        _Setting(_C._get_deterministic_algorithms, _set_deterministic),
        _Setting(_C._get_deterministic_algorithms_warn_only, _set_warn_only),
        _Setting(flushes_denormals, torch.set_flush_denormal),
    ]
    for name in ("cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction"):
        found.append(_Setting(getattr(_C, f"_get_{name}"), _spread(getattr(_C, f"_set_{name}"))))
    if hasattr(_C, "_get_sdp_priority_order"):
        found.append(_Setting(_C._get_sdp_priority_order, _writes_list(_C._set_sdp_priority_order)))
    found += [
        _Setting(getattr(_C, getter), getattr(_C, setter))
        for getter, setter in _named()
        if hasattr(_C, getter) and hasattr(_C, setter)
    ]
    found.append(_Setting(_C._get_float32_matmul_precision, _set_matmul_precision, _MIXED))
    found += [_Setting(partial(_get_precision, *one), partial(_set_precision, *one)) for one in _PRECISIONS]
    return tuple(found)


_SETTINGS = _settings()
_CUDNN_BENCHMARK = [setting.get for setting in _SETTINGS].index(_C._get_cudnn_benchmark)
_FIRST_PRECISION = len(_SETTINGS) - len(_PRECISIONS)


torch_settings = TorchSettings(
    tuple(one.get if one.otherwise is None else (one.get, one.otherwise) for one in _SETTINGS),
    _C._autograd._get_sequence_nr,
)
backend_flags = torch_settings.read
observe_flags, observe_flags_at_save = torch_settings.observe, torch_settings.observe_at_save
flags_of, flags_of_saving = torch_settings.of, torch_settings.at_save_of
flags_between_readings_of = torch_settings.between_readings_of
were_observed_at_save = torch_settings.were_observed_at_save


def watch_denormals() -> Callable[[], None]:
    """Reads the settings at each call of torch.set_flush_denormal, until the returned function was called as often as
    this one: which numbers an operation rounds to zero is then known without its module's call."""
    _count_watching(1)
    return partial(_count_watching, -1)


_set_flush_denormal = torch.set_flush_denormal
_lock = threading.Lock()
_watching = 0


def _count_watching(change: int) -> None:
    global _watching
    with _lock:
        _watching += change
        torch.set_flush_denormal = _observe_and_set if _watching else _set_flush_denormal  # type: ignore[assignment]


def _observe_and_set(mode: bool) -> bool:
    observe_flags()
    try:
        return _set_flush_denormal(mode)
    finally:
        observe_flags()


def times_convolutions(flags: Flags) -> bool:
    """True if cuDNN chooses the algorithm of a convolution by timing several (torch.backends.cudnn.benchmark).

    It keeps the choice for each thread, so the thread of the backward pass may choose another one. Deterministic
    algorithms are timed too, and two of them may differ in bits.
    """
    return bool(flags[_CUDNN_BENCHMARK])


def changes_to(flags: Flags) -> tuple[list[Change], list[Change]]:
    """The changes that set `flags`, and those that restore the present settings. Each list may be run again from its
    beginning, however far either was run before. Both are empty if nothing differs."""
    present = backend_flags()
    if present is flags or present == flags:
        return [], []
    make: list[Change] = [partial(_set_flags, flags)]
    back: list[Change] = []
    for setting, wanted, now in list(zip(_SETTINGS, flags, present, strict=True))[:_FIRST_PRECISION]:
        if now != wanted:
            back.append(partial(setting.set, now))
    if back or present[_FIRST_PRECISION:] != flags[_FIRST_PRECISION:]:
        back += [partial(_set_precision, *name, value) for name, value in _own_precisions().items()]
    return make, back


def _set_flags(flags: Flags) -> None:
    """Set the settings that differ, in order: a setting may change later ones."""
    present = backend_flags()
    for index, (setting, wanted) in enumerate(zip(_SETTINGS, flags, strict=True)):
        if present[index] != wanted:
            setting.set(wanted)
            present = backend_flags()
    if any(found != wanted for found, wanted in zip(present, flags, strict=True) if wanted != _MIXED):
        raise VdnnError(
            "torch's settings for kernels (torch.backends, torch.set_float32_matmul_precision and the like) cannot be "
            "set to their values of the forward pass. Do not change them between forward and backward, or run "
            "vdnn.offload(recompute=False)."
        )


def _own_precisions() -> dict[tuple[str, str], str]:
    """The precisions that are set, "none" for an inherited one. See [Note: Resolved precisions]: if a value may be
    inherited, the parent's is changed for a moment to find out."""
    own: dict[tuple[str, str], str] = {}
    for name in _PRECISIONS:
        value = _get_precision(*name)
        parent = ("generic", "all") if name[1] == "all" else (name[0], "all")
        if name != parent and value != "none" and value == _get_precision(*parent):
            other = "tf32" if value == "ieee" else "ieee"
            try:
                try:
                    _set_precision(*parent, other)
                    if _get_precision(*name) == other:
                        value = "none"
                finally:
                    _set_precision(*parent, own[parent])
            finally:  # an interrupt may end the inner one early
                _set_precision(*parent, own[parent])
        own[name] = value
    return own
