"""CUDA graphs and compiled code: what hooks must not become a part of.

A graph that is captured by hand is refused when the first hook runs amid the capture. What torch.compile runs as graphs
is found and refused before it trains, in a model and around a save: a graph computes at fixed addresses of a pool of
its own, and moving what it saved frees nothing there. Modes "reduce-overhead" and "max-autotune" ask for graphs, and so
do Inductor's option triton.cudagraphs and the backend "cudagraphs". What was asked for is read off what torch.compile
returned, so that the CPU, where no graph is ever captured, refuses the same.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from vdnn.errors import CombinationError, VdnnError

_FRAMES = "torch._dynamo.eval_frame"
_NOT_MARKED: frozenset[torch.nn.Module] = frozenset()


def keep_dynamo_out(hook: Callable[..., object]) -> None:
    """torch.compile would trace a hook that runs amid compiled code, and all that it calls: no part of the program."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(hook.__code__, frames._FrameExecStrategy(skip, skip))


def refuse_capture() -> None:
    """A copy to the host cannot be part of a CUDA graph: each replay would read and write the addresses of this step.
    Asked only of what would move: what is kept may be captured."""
    if torch.cuda.is_current_stream_capturing():
        raise VdnnError(
            "a CUDA graph is being captured inside vdnn.offload, and what is offloaded cannot be part of it: capture "
            "outside of the session, or under vdnn.paused()."
        )


def refuse_graphs_in(model: torch.nn.Module, marked: Container[torch.nn.Module] = _NOT_MARKED) -> None:
    """What is `marked` saves nothing that would move, and may be what it likes."""
    for name, module in _modules_of(model, marked):
        # torch.compile(module) holds its code as an attribute, module.compile() as another, and model.forward =
        # torch.compile(model.forward) as a third.
        for held in tuple(vars(module).values()):
            if isinstance(held, types.FunctionType) and uses_graphs(held):
                raise _error(f"in {name!r}" if name else f"around the {type(model).__name__}")


def refuse_graphs_around() -> None:
    """Raises if this is called from within code that torch.compile runs as CUDA graphs. Asked at every save that is to
    move: where nothing in the process was compiled it is this one call."""
    if _FRAMES not in sys.modules:  # importing it takes a second
        return
    backends = sys.modules[_FRAMES].cached_backends
    if not backends or not _known.any_with_graphs(backends):
        return
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and _has_graphs(frame.f_locals.get("self")):
            raise _error(f"around {_name_of(frame.f_locals.get('fn'))}")
        frame = frame.f_back  # type: ignore[assignment]


def refuse_graphs_of(backend: str | Callable[..., Any], mode: str | None) -> None:
    """By what torch.compile is going to be asked for."""
    if uses_graphs(torch.compile(_nothing, backend=backend, mode=mode)):
        raise _error(f"by backend={backend!r}, mode={mode!r}")


def uses_graphs(compiled: Callable[..., Any]) -> bool:
    """Of what torch.compile returned; of anything else False."""
    asks = getattr(compiled, "get_compiler_config", None)
    if not isinstance(asks, types.FunctionType):
        return False
    cells = dict(zip(asks.__code__.co_freevars, asks.__closure__ or (), strict=True))
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
    """`context` is what torch.compile made of its options."""
    callback = getattr(context, "callback", None)
    if _FRAMES not in sys.modules or not callable(callback):
        return False
    frames = sys.modules[_FRAMES]
    innermost = getattr(frames, "innermost_backend", None) or frames.innermost_fn  # the name that older torches have
    return _is_graphs(innermost(callback))


def _is_graphs(backend: Any) -> bool:
    backend = getattr(backend, "compiler_fn", backend)  # one that was asked for by name is inside of another
    if getattr(backend, "compiler_name", None) == "cudagraphs":
        return True
    asks = getattr(backend, "get_compiler_config", None)
    config = asks() if callable(asks) else None
    return isinstance(config, dict) and bool(config.get("triton.cudagraphs"))


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _error(where: str) -> CombinationError:
    return CombinationError(
        ours="vdnn.offload",
        theirs=f"the CUDA graphs of torch.compile {where}",
        reason="a graph computes at fixed addresses of a pool of its own, so that moving what it saved frees nothing",
        way_out="Compile with mode='default' or 'max-autotune-no-cudagraphs', or mark the module that calls what is "
        "compiled with vdnn.keep()",
    )


class _Known:
    """Whether anything in this process was compiled with graphs, asked anew when torch knows another backend."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] = (0, 0)
        self._answer = False

    def any_with_graphs(self, backends: dict[int, Any]) -> bool:
        seen = len(backends), next(reversed(backends))
        if seen != self._seen:
            self._answer = any(_is_graphs(backend) for backend in list(backends.values()))
            self._seen = seen
        return self._answer


_known = _Known()
