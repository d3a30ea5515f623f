"""Runs sessions that manage a whole training on virtual machines, beside what they predict and beside streaming.

    python -m benchmarks.whole_state.sessions [--part 1/2] [--table]

Eight small models on four machines under five budgets, all without data. Each cell runs a session that decides by
itself what leaves, one with parameters="all" from which everything leaves in each step, and one with parameters="all"
that lets some stay. Each cell is a line of results/whole_state_sessions.jsonl as soon as it is known, and is not run
again then.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vdnn
from benchmarks.text_table import render_table
from vdnn.runtime.training_state.state_room import StateRoom

RESULTS = Path(__file__).parent.parent / "results"
MACHINES = ("rtx-4090", "h100", "rtx-3090", "a100-40")
SHARES = (0.9, 0.7, 0.5, 0.35, 0.25)  # of the peak with everything on the device
_STEPS = 12
_STAYS = " stay on the device"  # in the line of a report
_REMARKS = (
    "chosen: a session with model=, optimizer= and the budget alone, and what it manages; all: parameters='all'; "
    "streamed: the same, and everything leaves in each step.",
    "time, peak: of the last chosen step, over what the session's plan predicts; over: steps behind the third over the "
    "budget.",
)
Made = tuple[nn.Module, torch.Tensor]


class Block(nn.Module):
    """A block of a transformer, with attention by torch's own kernel."""

    def __init__(self, width: int, *, is_causal: bool = True, is_gated: bool = False) -> None:
        super().__init__()
        norm = nn.RMSNorm if is_gated else nn.LayerNorm
        self.before, self.between = norm(width), norm(width)
        self.heads, self.is_causal = width // 64, is_causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Linear(width, 4 * width) if is_gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, 64).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        h = self.between(x)
        up = nn.functional.gelu(self.up(h)) if self.gate is None else nn.functional.silu(self.gate(h)) * self.up(h)
        found: torch.Tensor = x + self.down(up)
        return found


class Recurrent(nn.Module):
    """Two layers of a recurrent network between linear ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.cells, self.out = nn.Linear(width, width), nn.LSTM(width, width, 2), nn.Linear(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.cells(self.into(x))[0])
        return found


def _convolutions(width: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers)


def _linear(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def blocks(width: int, depth: int, **options: Any) -> nn.Sequential:
    return nn.Sequential(*[Block(width, **options) for _ in range(depth)])


MODELS: dict[str, Callable[[], Made]] = {
    "decoder, 4 x 1,024 tokens": lambda: (blocks(768, 4), torch.ones(4, 1024, 768)),
    "decoder, 1 x 512 tokens": lambda: (blocks(1024, 4), torch.ones(1, 512, 1024)),
    "gated decoder, 2 x 1,024 tokens": lambda: (blocks(1024, 3, is_gated=True), torch.ones(2, 1024, 1024)),
    "encoder, 16 x 197 tokens": lambda: (blocks(768, 4, is_causal=False), torch.ones(16, 197, 768)),
    "linear layers, 2,048 rows": lambda: (_linear(1024, 8), torch.ones(2048, 1024)),
    "linear layers, 256 rows": lambda: (_linear(2048, 6), torch.ones(256, 2048)),
    "convolutions, 16 images": lambda: (_convolutions(128, 6), torch.ones(16, 3, 64, 64)),
    "recurrent, 64 x 16": lambda: (Recurrent(1024), torch.ones(16, 64, 1024)),
}


@dataclass(frozen=True, slots=True)
class Ran:
    """The last step of a session. `over`: steps behind the third that took more than the budget. `refused`: why.
    `stays`: what the session says that stays on the device."""

    step_ns: int = 0
    peak_bytes: int = 0
    predicted_ns: int = 0
    predicted_bytes: int = 0
    over: int = 0
    extent: str = ""
    refused: str = ""
    stays: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    model: str
    machine: str
    share: float
    budget_bytes: int
    plain_ns: int
    chosen: Ran
    some_stay: Ran
    streamed: Ran

    @property
    def name(self) -> tuple[str, str, float]:
        return self.model, self.machine, self.share


def cell_names() -> list[tuple[str, str, float]]:
    return [(model, machine, share) for machine in MACHINES for model in MODELS for share in SHARES]


def _step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def plain(make: Callable[[], Made], machine: str) -> tuple[int, int]:
    """The time and the peak of a step with everything on the device."""
    with vdnn.VirtualMachine(machine) as virtual:
        made, x = make()
        optimizer = torch.optim.AdamW(made.parameters())
        for _ in range(3):
            virtual.reset_peak()
            began = virtual.now_ns
            _step(made, x, optimizer)
        return virtual.now_ns - began, virtual.peak_bytes


def ran(make: Callable[[], Made], machine: str, budget_bytes: int, *, decides: bool = True, **options: Any) -> Ran:
    """A session of some steps. `decides`: what is managed may stay."""
    stepped, over, began = StateRoom.stepped, 0, 0
    if not decides:
        StateRoom.stepped = lambda *_: None  # type: ignore[method-assign]
    try:
        with vdnn.VirtualMachine(machine) as virtual:
            made, x = make()
            optimizer = torch.optim.AdamW(made.parameters())
            given: dict[str, Any] = {"device": virtual, "model": made, "optimizer": optimizer, **options}
            if "plan" not in options:  # which has a budget of its own
                given["budget"] = budget_bytes
            with vdnn.offload(**given) as session:
                for number in range(_STEPS):
                    virtual.reset_peak()
                    began = virtual.now_ns
                    _step(made, x, optimizer)
                    session.step()
                    over += number > 2 and virtual.peak_bytes > budget_bytes
                took_ns, peak_bytes = virtual.now_ns - began, virtual.peak_bytes
                predicted = session._engine.steps.predicted()
                timeline = None if predicted is None else predicted[1]
                room = session._engine.state_room  # its prediction is that of a step with what stays
                extent = session._engine.extents.of(made)
    except vdnn.BudgetError as error:
        return Ran(refused=str(error))
    finally:
        StateRoom.stepped = stepped  # type: ignore[method-assign]
    found = (0, 0) if timeline is None else (room.predicted_ns or timeline.step_ns, timeline.peak_bytes)
    stays = "".join(line.strip().split(_STAYS)[0] for line in room.lines if _STAYS in line)
    return Ran(took_ns, peak_bytes, *found, over, "" if extent is None else extent.name.lower(), stays=stays)


def run(name: tuple[str, str, float]) -> Cell:
    model, machine, share = name
    make = MODELS[model]
    plain_ns, peak_bytes = plain(make, machine)
    budget = int(share * peak_bytes)
    return Cell(
        *name,
        budget,
        plain_ns,
        ran(make, machine, budget),
        ran(make, machine, budget, parameters="all"),
        ran(make, machine, budget, decides=False, parameters="all"),
    )


def read_cells(path: Path) -> list[Cell]:
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in map(json.loads, lines):
        line |= {way: Ran(**line[way]) for way in ("chosen", "some_stay", "streamed")}
        found.append(Cell(**line))
    known = {cell.name: cell for cell in found}
    return [known[name] for name in cell_names() if name in known]


def table_of(cells: Iterable[Cell]) -> str:
    def times(cell: Cell, one: Ran) -> str:
        return "refused" if one.refused else f"{one.step_ns / cell.plain_ns:.3f}"

    def off(executed: int, predicted: int) -> str:
        return f"{executed / predicted - 1:+.1%}" if predicted else ""

    rows = [
        (
            cell.model,
            cell.machine,
            f"{cell.share:.0%}",
            cell.chosen.extent,
            times(cell, cell.chosen),
            times(cell, cell.some_stay),
            times(cell, cell.streamed),
            off(cell.chosen.step_ns, cell.chosen.predicted_ns),
            off(cell.chosen.peak_bytes, cell.chosen.predicted_bytes),
            str(cell.chosen.over or ""),
        )
        for cell in cells
    ]
    header = ("model", "machine", "budget", "managed", "chosen", "all", "streamed", "time", "peak", "over")
    return render_table("Last step of sessions, over plain, in virtual time", header, rows, _REMARKS)


def sentences(cells: Sequence[Cell]) -> list[str]:
    """Says what the cells show together."""
    both = [cell for cell in cells if not cell.chosen.refused and not cell.streamed.refused]
    slower = [cell for cell in both if cell.chosen.step_ns > cell.streamed.step_ns]
    gains = sorted(cell.streamed.step_ns / cell.chosen.step_ns for cell in both)
    refused = [cell for cell in cells if cell.chosen.refused]
    more = [cell for cell in refused if not cell.some_stay.refused]
    lines = [
        f"{len(cells)} of {len(cell_names())} cells; {len(refused)} refused, of which {len(more)} are not with "
        "parameters='all'"
    ]
    if gains:
        lines.append(
            f"streaming everything takes {gains[len(gains) // 2]:.2f} times as long in the median and {gains[-1]:.2f} "
            f"at most; it is faster in {len(slower)} of {len(both)}"
        )
    lines.append(
        f"steps behind the third over the budget: {sum(cell.chosen.over for cell in cells)} of "
        f"{(_STEPS - 3) * (len(cells) - len(refused))}"
    )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_state.sessions")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N equal parts")
    parser.add_argument("--table", action="store_true", help="only write the table of the cells that are known")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results")
    options = parser.parse_args(arguments)
    jsonl = options.results / "whole_state_sessions.jsonl"
    warnings.simplefilter("ignore")
    if not options.table:
        index, parts = map(int, options.part.split("/"))
        for name in cell_names()[index - 1 :: parts]:
            if all(cell.name != name for cell in read_cells(jsonl)):
                with jsonl.open("a") as file:
                    file.write(json.dumps(asdict(run(name))) + "\n")
    cells = read_cells(jsonl)
    text = "\n".join([*sentences(cells), "", table_of(cells)])
    (options.results / "whole_state_sessions.txt").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
