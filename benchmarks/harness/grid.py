"""Grid: the cells of workloads, peers and budgets at one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.harness.cell_spec import CellSpec
from benchmarks.harness.synthetic_data import DataOptions
from benchmarks.harness.workloads import workload_named
from benchmarks.peers import PEERS, peers_named

# In a list of budgets: the peaks of the other peers, with one cell for each of them.
AS_PEERS = "peers"


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of cells. With `batch` None each workload has its own batch. `deterministic` is for all of its steps."""

    place: str
    hardware: str
    workloads: Sequence[str]
    peers: Sequence[str]
    budgets: Sequence[str]
    batch: int | None = None
    steps: int = 5
    data: DataOptions = field(default_factory=DataOptions)
    deterministic: bool = False

    def batch_of(self, workload: str) -> int:
        entry = workload_named(workload)
        return self.batch or (entry.tiny_batch if self.place == "sim" else entry.batch)

    def specs(self, workload: str, run: str | None) -> list[CellSpec]:
        """The cells of one workload, plain first: budgets are shares of its peak, gradients are compared with its."""
        peers = ["plain", *(peer for peer in self.peers if peer != "plain")]
        if any(PEERS[peer].compiled for peer in peers) and "compiled-plain" not in peers:
            peers.insert(1, "compiled-plain")
        return [
            CellSpec(
                workload,
                peer,
                self.place,
                self.hardware,
                budget,
                batch=self.batch_of(workload),
                steps=self.steps,
                run=run,
                data=self.data,
                deterministic=self.deterministic,
            )
            for peer in peers
            for budget in (self._budgets(peers) if PEERS[peer].has_budget else (None,))
        ]

    def _budgets(self, peers: Sequence[str]) -> list[str]:
        others = [
            f"={peer}"
            for peer in peers
            if not PEERS[peer].has_budget and not PEERS[peer].compiled and not peer.startswith(("plain", "vdnn"))
        ]
        return [one for budget in self.budgets for one in (others if budget == AS_PEERS else [budget])]


def quick_grids() -> list[Grid]:
    """The grids of `--quick`: three networks in virtual time, and two tiny ones with gradients. Minutes on two slow
    cores."""
    peers = peers_named(["plain", "checkpoint", "checkpoint-selective", "save-on-cpu-pinned", "vdnn-2016", "vdnn-auto"])
    budgets = ("90%", "80%", "70%", "60%", "min")
    tiny = peers_named(["plain", "checkpoint", "save-on-cpu-pinned", "vdnn-auto"])
    return [
        Grid("virtual", "h100", ("vgg16", "gpt2", "unet"), peers, budgets),
        Grid("sim", "h100", ("gpt2", "unet"), tiny, ("min",)),
    ]
