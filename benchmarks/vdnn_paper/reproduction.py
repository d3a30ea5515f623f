"""`make bench`: vDNN's headline table, with the published figures, ours for its rules of 2016, and those of `auto`.

    python -m benchmarks.vdnn_paper.reproduction [--networks VGG-16-256,...] [--json FILE]

The ten networks of the vDNN paper run on its card, a Titan X of 12 GiB, in float32 and virtual time: unmodified PyTorch
steps without data. `rules of 2016` is the memory that the paper's rules need, computed from shapes (vdnn_2016.py). The
policies are this package's vdnn-dyn and vdnn-all, with the paper's barrier at the end of each layer, planned for 12 GiB
and predicted; `auto` gets 12 GiB, and then only the peak of vdnn-dyn. docs/reproduction.md says where and why the
figures differ from those published. None of the figures is a measurement of a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.models import VDNN_NETWORKS, VdnnNetwork
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from benchmarks.vdnn_paper import vdnn_2016
from vdnn.hardware import load_profile
from vdnn.planning.costs import LinkCosts, profile_costs
from vdnn.planning.planned_step import plan_step
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of
from vdnn.step.recording import Recording

HARDWARE = "titan-x"
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Published:
    """Figures of the abstract (Rhu and others, MICRO 2016) that name a network: the mean memory saved and the slowdown
    relative to enough memory, both in per cent, and the GB that the network needs."""

    less_percent: str = ""
    slower_percent: str = ""
    needs_gb: str = ""


# Six networks do not train without vDNN. For these the paper has ranges: 73 to 98 % less memory, 1 to 18 % slower.
RANGE_LESS, RANGE_SLOWER = "73..98", "1..18"
PUBLISHED = {
    "AlexNet (128)": Published("89"),
    "OverFeat (128)": Published("91"),
    "GoogLeNet (128)": Published("95"),
    "VGG-16 (64)": Published(),
    "VGG-16 (128)": Published(RANGE_LESS, RANGE_SLOWER, "14"),
    "VGG-16 (256)": Published(RANGE_LESS, "18", "28"),
    "VGG-116 (32)": Published(RANGE_LESS, RANGE_SLOWER),
    "VGG-216 (32)": Published(RANGE_LESS, RANGE_SLOWER),
    "VGG-316 (32)": Published(RANGE_LESS, RANGE_SLOWER),
    "VGG-416 (32)": Published("98", RANGE_SLOWER, "67"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The prediction of a policy for a step under a budget, which it may exceed."""

    policy: str
    budget_bytes: int
    step_ns: int
    peak_bytes: int

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.budget_bytes


@dataclass(frozen=True, slots=True)
class NetworkRow:
    """One network. `rules_*` are computed from shapes, for feature extraction only; None if it is not a chain."""

    network: str
    keep_ns: int
    keep_bytes: int
    rules_baseline_bytes: int
    rules_mean_bytes: float | None
    dyn: Outcome
    everything: Outcome
    auto: Outcome
    auto_at_dyn: Outcome

    @property
    def rules_less(self) -> float | None:
        return None if self.rules_mean_bytes is None else 1 - self.rules_mean_bytes / self.rules_baseline_bytes


def rows_of(networks: Sequence[VdnnNetwork], progress: Progress) -> Iterator[NetworkRow]:
    profile = load_profile(HARDWARE)
    costs = profile_costs(profile)
    for network in networks:
        progress.begin(network.title)
        recording = rehearse(subject_of(network.make, network.batch), profile).recording
        dyn = planned(recording, costs, profile.memory_bytes, "vdnn-dyn")
        baseline_bytes, mean_bytes = rules_of_2016(network.title)
        yield NetworkRow(
            network.title,
            recording.compute_ns,
            recording.peak_bytes,
            baseline_bytes,
            mean_bytes,
            dyn,
            planned(recording, costs, profile.memory_bytes, "vdnn-all"),
            planned(recording, costs, profile.memory_bytes, "auto"),
            planned(recording, costs, dyn.peak_bytes, "auto"),
        )


def planned(recording: Recording, costs: LinkCosts, budget_bytes: int, policy: str) -> Outcome:
    timeline = plan_step(recording, costs, budget_bytes, policy, certify=False).timeline
    return Outcome(policy, budget_bytes, timeline.step_ns, timeline.peak_bytes)


def rules_of_2016(title: str) -> tuple[int, float | None]:
    features = vdnn_2016.network_of(*vdnn_2016.NETWORKS[title]).feature_extraction()
    if title == vdnn_2016.BRANCHED:
        return features.baseline_bytes, None
    return features.baseline_bytes, vdnn_2016.replay(features, vdnn_2016.ALL).mean_bytes


def render(rows: Sequence[NetworkRow]) -> str:
    header = (
        "network",
        "less %",
        "slower %",
        "rules of 2016 %",
        "all kept GiB",
        "vdnn-all GiB",
        "slower %",
        "vdnn-dyn GiB",
        "slower %",
        "auto GiB",
        "slower %",
        "as low %",
    )
    cells = []
    for row in rows:
        published = PUBLISHED[row.network]
        rules = "-" if row.rules_less is None else f"{100 * row.rules_less:.0f}"
        cells.append(
            (
                row.network,
                published.less_percent or "-",
                published.slower_percent or "-",
                rules,
                f"{row.keep_bytes / GIB:.2f}",
                *_shown(row.everything, row.keep_ns),
                *_shown(row.dyn, row.keep_ns),
                *_shown(row.auto, row.keep_ns),
                f"{slower_percent(row.auto_at_dyn, row.keep_ns):.1f}",
            )
        )
    remarks = [
        "First two columns: published (Rhu and others, MICRO 2016), mean memory saved and slowdown relative to enough "
        "memory; - if no figure names the network. Rules of 2016: mean memory saved by vDNN_all, computed from shapes, "
        "without workspaces. The others are whole PyTorch steps in virtual time, planned for the 12 GiB of a "
        "Titan X; (over) marks steps that take more. As low: auto with vdnn-dyn's peak as its budget. "
        "Deviations: docs/reproduction.md.",
    ]
    return render_table("vDNN's networks on its card, published and ours", header, cells, remarks)


def slower_percent(outcome: Outcome, keep_ns: int) -> float:
    return 100 * (outcome.step_ns / keep_ns - 1)


def _shown(outcome: Outcome, keep_ns: int) -> tuple[str, str]:
    over = "" if outcome.fits else "(over) "
    return f"{over}{outcome.peak_bytes / GIB:.2f}", f"{slower_percent(outcome, keep_ns):.1f}"


def sentence(rows: Sequence[NetworkRow]) -> str:
    """A summary for VGG-16 (256), or else for the last network that does not fit the card without vdnn."""
    told = [row for row in rows if row.keep_bytes > row.auto.budget_bytes and row.auto.fits]
    if not told:
        return "Every network fits with everything kept."
    row = next((one for one in told if one.network == "VGG-16 (256)"), told[-1])
    return (
        f"{row.network} needs {row.keep_bytes / GIB:.1f} GiB, and trains in {row.auto.peak_bytes / GIB:.1f} GiB of a "
        f"virtual Titan X {slower_percent(row.auto, row.keep_ns):.1f} % slower than with enough memory; the policy of "
        f"2016 takes {row.dyn.peak_bytes / GIB:.1f} GiB and is {slower_percent(row.dyn, row.keep_ns):.1f} % slower."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vdnn_paper.reproduction", description=__doc__.split("\n")[0]
    )
    by_name = {network.title.replace(" (", "-").rstrip(")"): network for network in VDNN_NETWORKS}
    parser.add_argument("--networks", default=",".join(by_name), metavar="NAMES", help="default: all ten")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows there, line by line")
    options = parser.parse_args(arguments)
    wanted = options.networks.split(",")
    for name in wanted:
        if name not in by_name:
            print(f"reproduction: expected networks among {', '.join(by_name)}, got {name!r}.", file=sys.stderr)
            return 2
    progress = Progress("reproduction", len(wanted))
    rows: list[NetworkRow] = []
    if options.json is not None:
        options.json.write_text("")
    for row in rows_of([by_name[name] for name in wanted], progress):
        rows.append(row)
        if options.json is not None:
            with options.json.open("a") as lines:
                lines.write(json.dumps(asdict(row)) + "\n")
    progress.end()
    print(render(rows))
    print(f"\n{sentence(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
