"""Finds the largest batch that trains in 16 GB, by policy, in virtual time, and compares it with published ones.

    python -m benchmarks.plans.max_batch benchmarks/results/max_batch.jsonl

Published (Peng and others, ASPLOS 2020, from memory of its table): the largest batches on a P100 of 16 GB in
TensorFlow: plain, with vDNN and with Capuchin. Ours are steps of PyTorch networks, rehearsed without data: in-place
ReLU, no optimizer state, no workspaces, no fragmentation, and all memory that the card reports as the budget. BERT is
BERT-base; the length of its texts is not in what we read, and is 128 tokens here.

The step of a batch is rehearsed once, which gives the bytes with everything kept, under vDNN's rules, and the least
that any plan reaches. Policies that meet every budget that can be met share one largest batch; for these the step is
planned and timed there, and its cost compared. The file has a line for each rehearsed batch and each step, which are
not run again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import models
from benchmarks.models.workload import Workload
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.runtime.rehearsal.largest_batch import find_largest_batch
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of
from vdnn.step.json_lines import append_json_lines, read_json_lines
from vdnn.step.recording import Recording

TOKENS = 128
CARD = "p100"
# Policies that meet every budget that some plan meets.
PLANNERS = ("capuchin", "capuchin-full", "auto-offload", "auto")
_FIRST = 16
_WAYS = ("keep", "vdnn-conv", "vdnn-all", "least")

_BATCHES = (
    "In brackets the published ones, in TensorFlow: with nothing done, with vDNN, with Capuchin. BERT-base on "
    f"{TOKENS} tokens, all of which have logits here, of TensorFlow's the masked ones only; which length was "
    "published is not in what we read.",
)
_COSTS = ("On a card that could keep everything; at Capuchin's published batch, and at the largest.",)


class Published(NamedTuple):
    """Largest batches in TensorFlow: with nothing done, with vDNN (None: not given), with Capuchin."""

    make: Callable[[int], Workload]
    kept: int
    vdnn: int | None
    capuchin: int


def bert(batch: int) -> Workload:
    return models.bert_base(batch, TOKENS)


NETWORKS = {
    "VGG-16": Published(models.vgg16, 228, 272, 350),
    "ResNet-50": Published(models.resnet50, 190, 520, 1014),
    "ResNet-152": Published(models.resnet152, 86, 330, 798),
    "BERT-base": Published(bert, 64, None, 450),
}


class Notes:
    """The known results, a line of JSON each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = {(one["network"], one["batch"], one["policy"]): one for one in read_json_lines(path).values}

    def find(self, network: str, batch: int, policy: str) -> dict[str, Any] | None:
        return self._known.get((network, batch, policy))

    def add(self, network: str, batch: int, policy: str, **figures: Any) -> dict[str, Any]:
        note = {"network": network, "hardware": CARD, "batch": batch, "policy": policy, **figures}
        self._known[network, batch, policy] = note
        append_json_lines(self._path, [note])
        return note


class Card:
    """The card, whose memory is the budget."""

    def __init__(self, notes: Notes) -> None:
        self._profile = load_profile(CARD)
        self._costs = profile_costs(self._profile)
        self._notes = notes
        self._recordings: dict[tuple[str, int], Recording] = {}

    @property
    def budget_bytes(self) -> int:
        return self._profile.memory_bytes

    def needs(self, network: str, batch: int) -> dict[str, int]:
        note = self._notes.find(network, batch, "all")
        if note is None:
            recording = self._recording(network, batch)
            by_rule = {
                rule: plan_step(recording, self._costs, None, rule).timeline.peak_bytes
                for rule in ("vdnn-conv", "vdnn-all")
            }
            needs = {"keep": recording.peak_bytes, **by_rule, "least": least_bytes(recording)}
            note = self._notes.add(network, batch, "all", needs=needs)
        found: dict[str, int] = note["needs"]
        return found

    def step(self, network: str, batch: int, policy: str) -> dict[str, Any]:
        note = self._notes.find(network, batch, policy)
        if note is not None:
            return note
        planned = plan_step(self._recording(network, batch), self._costs, self.budget_bytes, policy)
        return self._notes.add(
            network,
            batch,
            policy,
            fits=planned.fits,
            keep_ns=planned.recording.compute_ns,
            step_ns=planned.timeline.step_ns,
            plan_seconds=round(planned.plan_seconds, 2),
        )

    def _recording(self, network: str, batch: int) -> Recording:
        if (network, batch) not in self._recordings:
            self._recordings.clear()
            subject = subject_of(NETWORKS[network].make, batch)
            self._recordings[network, batch] = rehearse(subject, self._profile).recording
        return self._recordings[network, batch]


def largest_batches(network: str, card: Card) -> dict[str, int]:
    def spare_bytes(way: str, batch: int) -> int:
        return card.budget_bytes - card.needs(network, batch)[way]

    return {way: find_largest_batch(partial(spare_bytes, way), first=_FIRST) for way in _WAYS}


def batches_row(network: str, found: dict[str, int]) -> tuple[str, ...]:
    published = NETWORKS[network]
    beside = (published.kept, published.vdnn, None, published.capuchin)
    batches = (
        str(found[way]) if one is None else f"{found[way]} ({one})" for way, one in zip(_WAYS, beside, strict=True)
    )
    return network, *batches


def costs_rows(network: str, found: dict[str, int], card: Card, planners: Sequence[str]) -> list[tuple[str, ...]]:
    """The costs at the published batch, if it fits, and at the largest."""
    batches = sorted({min(NETWORKS[network].capuchin, found["least"]), found["least"]})
    return [
        (f"{network} ({batch})", *(_cost(card, network, batch, planner) for planner in planners)) for batch in batches
    ]


def _cost(card: Card, network: str, batch: int, policy: str) -> str:
    step = card.step(network, batch, policy)
    slower = f"{100 * (step['step_ns'] / step['keep_ns'] - 1):.1f} %"
    return slower if step["fits"] else "does not fit"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans.max_batch", description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, metavar="FILE", help="lines of JSON; continued if it exists")
    parser.add_argument("--networks", default=",".join(NETWORKS), metavar="NAMES")
    parser.add_argument("--policies", default=",".join(PLANNERS), metavar="NAMES", help="whose steps are timed")
    options = parser.parse_args(arguments)
    networks = options.networks.split(",")
    for name in networks:
        if name not in NETWORKS:
            raise SystemExit(f"max_batch: expected networks among {', '.join(NETWORKS)}, got {name!r}.")
    planners = options.policies.split(",")
    card = Card(Notes(options.results))
    progress = Progress("max_batch", len(networks))
    batches, costs = [], []
    for network in networks:
        progress.begin(network)
        found = largest_batches(network, card)
        batches.append(batches_row(network, found))
        costs += costs_rows(network, found, card, planners)
    progress.end()
    title = f"The largest batch on {CARD}, {card.budget_bytes} bytes"
    print(render_table(title, ("network", *_WAYS[:-1], "moved at will"), batches, _BATCHES), end="\n\n")
    print(render_table("How much slower than with everything kept", ("network", *planners), costs, _COSTS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
