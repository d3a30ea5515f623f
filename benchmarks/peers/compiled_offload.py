"""torch.compile's own activation offloading, which a flag of functorch turns on, and the compiled plain.

By its comment, the flag is for "testing purpose". Torch offloads tagged nodes of the forward graph. Here a pass
of inductor tags all results of a floating-point type with at least one MiB; torch decides which of them are saved and
can be offloaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.harness.places import CudaPlace, Place
from benchmarks.peers.peer import Opened, Peer, Trial

MIN_BYTES = 1 << 20


class CompiledPlain(Peer):
    """The plain of compiled cells: the compiled offloading is compared with it."""

    name = "compiled-plain"
    settling_steps = 3
    compiled = True

    @property
    def cell_name(self) -> str:
        return "plain"

    def refusal(self, place: Place, blocks: tuple[str, ...]) -> str | None:
        return _refusal(place)

    @contextlib.contextmanager
    def open(self, trial: Trial) -> Iterator[Opened]:
        torch._dynamo.reset()
        yield Opened(model=torch.compile(trial.workload.model))


class CompiledOffload(Peer):
    """Compiled offloading with torch's flags for copies on a stream of their own, sunk waits and prefetch."""

    name = "compiled-offload"
    settling_steps = 3
    compiled = True

    def refusal(self, place: Place, blocks: tuple[str, ...]) -> str | None:
        functorch: Any = torch._functorch.config
        if not hasattr(functorch, "enable_activation_offloading"):
            return f"torch {torch.__version__} has no enable_activation_offloading"
        return _refusal(place)

    @contextlib.contextmanager
    def open(self, trial: Trial) -> Iterator[Opened]:
        import torch._inductor.config as inductor

        torch._dynamo.reset()
        functorch: Any = torch._functorch.config
        flags = {
            "enable_activation_offloading": True,
            "activation_offload_separate_stream": True,
            "activation_offload_sink_wait": True,
            "activation_reload_prefetch": True,
        }
        known = {name: value for name, value in flags.items() if hasattr(functorch, name)}
        with functorch.patch(known), inductor.patch(joint_custom_pre_pass=tag_large_results):
            yield Opened(model=torch.compile(trial.workload.model), said="every large node was tagged")


def _refusal(place: Place) -> str | None:
    return None if isinstance(place, CudaPlace) else "a virtual machine cannot see operations of compiled code"


def tag_large_results(graph: Any) -> None:
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        if value.numel() * value.element_size() >= MIN_BYTES:
            node.meta["should_offload"] = True


COMPILED_PLAIN = CompiledPlain()
COMPILED_OFFLOAD = CompiledOffload()
