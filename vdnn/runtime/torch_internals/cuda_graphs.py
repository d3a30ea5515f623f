"""Refuses CUDA graphs, and keeps torch.compile from tracing hooks.

A graph that a program captures is refused when a hook runs during the capture. A model or function that torch.compile
runs as CUDA graphs is refused before it trains: a graph computes at fixed addresses in its own memory pool, so that
offloading its saved tensors frees nothing. Modes "reduce-overhead" and "max-autotune" ask for graphs, and so do
Inductor's option triton.cudagraphs and the backend "cudagraphs". These options are read from the function that
torch.compile returned, so that the CPU, where no graph is ever captured, refuses the same code.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from vdnn.errors import CombinationError, VdnnError

_FRAMES = "torch._dynamo.eval_frame"
_WRAPPED = "_torchdynamo_orig_backend"  # the attribute of Dynamo's wrappers that holds what they wrap
_NOT_MARKED: frozenset[torch.nn.Module] = frozenset()


def keep_dynamo_out(hook: Callable[..., object]) -> None:
    """Keeps torch.compile from tracing `hook` and all that it calls: hooks run inside compiled code, and are not a part
    of the program. What calls it in traced code has a graph break there."""
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    hook._torchdynamo_disable_msg = "a hook of vdnn is not a part of the program"  # type: ignore[attr-defined]
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(hook.__code__, frames._FrameExecStrategy(skip, skip))


def refuse_capture() -> None:
    """Raises during a capture: each replay of a copy would read and write the addresses of this step.

    Called only for saves and uses of storages that would move; kept saves may be captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise VdnnError(
            "a CUDA graph is being captured inside vdnn.offload, and a copy to the host cannot be part of it: capture "
            "outside of the session, or under vdnn.paused()."
        )


def refuse_graphs_in(model: torch.nn.Module, marked: Container[torch.nn.Module] = _NOT_MARKED) -> None:
    """Raises if a module of `model` was compiled with CUDA graphs. `marked` modules save nothing that would move, and
    are not checked."""
    for name, module in _modules_of(model, marked):
        # torch.compile(module), module.compile() and model.forward = torch.compile(model.forward) each keep the
        # compiled function in a different attribute.
        for attribute in tuple(vars(module).values()):
            if isinstance(attribute, types.FunctionType) and uses_graphs(attribute):
                raise _error(f"in {name!r}" if name else f"around the {type(model).__name__}")


def refuse_graphs_around() -> None:
    """Raises if a caller is code that torch.compile runs as CUDA graphs.

    Called at every save that would move, so it returns at once if nothing in the process was compiled.
    """
    frames = sys.modules.get(_FRAMES)
    if frames is None or not frames.cached_backends or not may_run_as_graphs():
        return
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and _has_graphs(frame.f_locals.get("self")):
            raise _error(f"around {_name_of(frame.f_locals.get('fn'))}")
        frame = frame.f_back  # type: ignore[assignment]


def may_run_as_graphs() -> bool:
    """True if code in this process was compiled with CUDA graphs, so that every save has to look at its callers."""
    if _FRAMES not in sys.modules:  # importing it takes a second
        return False
    backends = sys.modules[_FRAMES].cached_backends
    return bool(backends) and _compiled.uses_graphs(backends)


def refuse_graphs_of(backend: str | Callable[..., Any], mode: str | None) -> None:
    """Raises if torch.compile with these arguments would use CUDA graphs."""
    if uses_graphs(torch.compile(_nothing, backend=backend, mode=mode)):
        raise _error(f"by backend={backend!r}, mode={mode!r}")


def uses_graphs(compiled: Callable[..., Any]) -> bool:
    """True if `compiled` was returned by torch.compile and runs as CUDA graphs."""
    config_of = getattr(compiled, "get_compiler_config", None)
    if not isinstance(config_of, types.FunctionType):
        return False
    cells = dict(zip(config_of.__code__.co_freevars, config_of.__closure__ or (), strict=True))
    return "self" in cells and _has_graphs(cells["self"].cell_contents)


def _nothing() -> None: ...


def _modules_of(
    model: torch.nn.Module, marked: Container[torch.nn.Module], path: str = ""
) -> Iterator[tuple[str, torch.nn.Module]]:
    if model in marked:
        return
    yield path, model
    for name, child in model.named_children():
        yield from _modules_of(child, marked, f"{path}.{name}" if path else name)


def _has_graphs(context: Any) -> bool:
    """`context` is the object that holds the options of torch.compile."""
    callback = getattr(context, "callback", None)
    if _FRAMES not in sys.modules or not callable(callback):
        return False
    while hasattr(callback, _WRAPPED):
        callback = getattr(callback, _WRAPPED)
    return _is_graphs(callback)


def _is_graphs(backend: Any) -> bool:
    backend = getattr(backend, "compiler_fn", backend)  # a backend that was named by a string is wrapped
    if getattr(backend, "compiler_name", None) == "cudagraphs":
        return True
    config_of = getattr(backend, "get_compiler_config", None)
    config = config_of() if callable(config_of) else None
    return isinstance(config, dict) and bool(config.get("triton.cudagraphs"))


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _error(where: str) -> CombinationError:
    return CombinationError(
        ours="vdnn.offload",
        theirs=f"the CUDA graphs of torch.compile {where}",
        reason="a graph computes at fixed addresses in its own memory pool, so that offloading its saved tensors frees "
        "nothing",
        way_out="Compile with mode='default' or 'max-autotune-no-cudagraphs', or mark the module that calls the "
        "compiled code with vdnn.keep()",
    )


class _CompiledBackends:
    """Knows if any code in this process was compiled with CUDA graphs. Looks again when torch has a new backend."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] = (0, 0)
        self._answer = False

    def uses_graphs(self, backends: dict[int, Any]) -> bool:
        seen = len(backends), next(reversed(backends))
        if seen != self._seen:
            self._answer = any(_is_graphs(backend) for backend in list(backends.values()))
            self._seen = seen
        return self._answer


_compiled = _CompiledBackends()
