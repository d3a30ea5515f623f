"""Part of gpu-proof: what a call costs that a session makes on its way: torch's statistics, events, waits, pointers.

Each call is repeated in turns with all others, and the best turn counts, as a time and as a multiple of a call of an
empty function of Python. The allocator holds some hundreds of blocks meanwhile, as in training. `--device cpu` leaves
out what needs a GPU, to try the program.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.text_table import render_table

TURNS, CALLS = 15, 200
BLOCKS = 300
EMPTY = "an empty function"


@dataclass(frozen=True, slots=True)
class CallCost:
    """The cost of one call. `over_empty` is a multiple of the empty function's."""

    call: str
    ns: float
    over_empty: float


def _empty() -> None:
    return None


def calls_of(device: torch.device) -> dict[str, Callable[[], object]]:
    tensor = torch.ones(64, device=device)
    calls: dict[str, Callable[[], object]] = {EMPTY: _empty, "Tensor.data_ptr": tensor.data_ptr}
    calls["an operation on 64 elements"] = tensor.sin
    if device.type != "cuda":
        return calls
    cuda: Any = torch.cuda
    stream, event, timed = cuda.Stream(), cuda.Event(), cuda.Event(enable_timing=True)
    return calls | {
        "memory_stats_as_nested_dict": cuda.memory_stats_as_nested_dict,
        "memory_stats": cuda.memory_stats,
        "memory_allocated": cuda.memory_allocated,
        "host_memory_stats": cuda.host_memory_stats,
        "mem_get_info": cuda.mem_get_info,
        "current_stream": cuda.current_stream,
        "Event.record": event.record,
        "Event.record, timed": timed.record,
        "Event.query": event.query,
        "Stream.wait_event": lambda: stream.wait_event(event),
        "empty of 1 MiB, and its release": lambda: torch.empty(1 << 20, dtype=torch.uint8, device=device),
    }


def measure(calls: dict[str, Callable[[], object]], settle: Callable[[], object]) -> list[CallCost]:
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(TURNS):
        for name, call in calls.items():
            settle()  # a stream that is full would make calls wait
            begin_ns = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (time.perf_counter_ns() - begin_ns) / CALLS)
    return [CallCost(name, ns, ns / best[EMPTY]) for name, ns in best.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_a_gpu.statistics_cost", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows there, line by line")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("statistics_cost: torch sees no GPU here: --device cpu tries the program without one.", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    held = [torch.empty(1024 * (1 + index), device=device) for index in range(BLOCKS)]
    rows = measure(calls_of(device), torch.cuda.synchronize if options.device == "cuda" else _empty)
    if options.json is not None:
        options.json.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    cells = [(row.call, f"{row.ns / 1e3:.2f}", f"{row.over_empty:.1f}") for row in rows]
    remark = f"Best of {TURNS} turns of {CALLS} calls, with {len(held)} blocks allocated."
    print(render_table(f"What a call costs on {options.device}", ("call", "us", "x empty"), cells, [remark]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
