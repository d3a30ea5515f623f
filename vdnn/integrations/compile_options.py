"""compile_options: options with which the tensors that a compiled region saves stay under a budget.

Hooks on saved tensors cannot help a model that is compiled as a whole, because backward asks for all of them at once.
So the plan is in the graph: a partitioner decides what forward saves, what backward recomputes, and what is offloaded
between the two. Torch's own cut is taken wherever it fits the budget; otherwise the plan with the shortest step on the
hardware given.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from vdnn.bytesize import format_bytes, parse_bytes
from vdnn.errors import CombinationError, InvalidArgumentError
from vdnn.hardware import HardwareProfile, load_profile
from vdnn.integrations.compiled_moves import put_into
from vdnn.integrations.region_plan import RegionPlan, RegionPlanner
from vdnn.runtime.machine.graph_cost import GraphCost
from vdnn.runtime.torch_internals import joint_graph
from vdnn.runtime.torch_internals.joint_graph import Cut, CutTrial

_OPTION = "custom_partitioner_fn"


def compile_options(
    budget: int | str,
    hardware: str | Path | HardwareProfile | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    offload: bool = True,
) -> dict[str, Any]:
    """Options for torch.compile under which a region holds at most `budget` of inputs, outputs and saved values.

    Example::

        model = torch.compile(model, options=vdnn.compile_options(budget="12GiB"))

    A region is a graph that torch compiles; each has the whole budget for itself. Its inputs (parameters among them),
    its outputs and the tensors saved for backward count while they are on the device, each storage once. Gradients and
    the memory that a kernel needs while it runs do not. Values that do not fit are recomputed in backward, or offloaded
    to pinned memory and reloaded ahead of their use, whichever takes less time. Gradients are those of torch.compile
    without these options, but for the last bits where Inductor fuses recomputed operations with others. Needs torch
    2.13.

    Args:
        budget: bytes, or a text such as "12GiB".
        hardware: the card whose times decide what is recomputed or offloaded: the name of a profile, its file, or a
            profile. By default this machine's card is measured.
        options: other options of Inductor, passed on.
        offload: False recomputes, and offloads nothing.

    Raises:
        CombinationError: these options are given twice, or another partitioner is set.
        TorchMissingError: this version of torch lacks a needed interface. InvalidArgumentError: the budget is not a
        size. Also while torch compiles, if no choice fits the budget, and a CombinationError if something would be
        offloaded under CUDA graphs: torch wraps both in its BackendCompilerFailed.
    """
    joint_graph.require_partitioner()
    others = dict(options or {})
    _check_alone(others)
    return {**others, _OPTION: BudgetPartitioner(_budget_bytes(budget), _profile(hardware), offloads=offload)}


@dataclass(frozen=True, slots=True)
class RegionChoice:
    """The choice for one region. `by` says whose cut it is: "min-cut" is torch's own. `saved_bytes` stay on the device
    between forward and backward, `offloaded_bytes` do not. `peak_bytes` is the most that is held at a time, and
    `step_ns` the predicted time of forward and backward.
    """

    name: str
    by: str
    inputs_and_outputs_bytes: int
    saved_bytes: int
    min_cut_saved_bytes: int
    recompute_ns: int
    offloaded_bytes: int
    step_ns: int
    peak_bytes: int


class BudgetPartitioner(joint_graph.Partitioner):
    """Cuts joint graphs under a budget. `regions` lists the choices of this process, those from torch's caches aside.

    Inductor takes it as an option, and the backends of torch's `aot_autograd(partition_fn=...)` as their function.
    """

    def __init__(self, budget_bytes: int, profile: HardwareProfile, *, offloads: bool = True) -> None:
        self.budget_bytes, self._offloads = budget_bytes, offloads
        self.regions: list[RegionChoice] = []
        self._profile = profile

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        cuts = RegionCuts(gm, joint_inputs, kwargs.pop("num_fwd_outputs"), kwargs)
        planner = RegionPlanner(self.budget_bytes, self._profile, offloads=self._offloads)
        plans = plans_of(cuts, planner)
        if not plans:
            raise self._refusal(least_of(cuts, planner))
        by = min(plans, key=lambda name: plans[name].step_ns)
        plan, plain = plans[by], cuts.plain.held.saved_bytes
        if plan.moves:
            self._refuse_cuda_graphs()
            put_into(plan.cut.forward, plan.cut.backward, plan.step, plan.moves)
        held = plan.cut.held
        self.regions.append(
            RegionChoice(
                joint_graph.region_name(),
                by,
                held.inputs_and_outputs_bytes,
                held.saved_bytes - plan.offloaded_bytes,
                plain,
                planner.recompute_ns(plan.cut),
                plan.offloaded_bytes,
                plan.step_ns,
                plan.peak_bytes,
            )
        )
        return plan.cut.forward, plan.cut.backward

    def uuid(self) -> bytes:
        """Differs with this package, the budget and the figures of the hardware: torch caches compiled graphs by it."""
        package = Path(__file__).parents[1]
        text = repr((hash_of_code(package), torch.__version__, self.budget_bytes, self._profile, self._offloads))
        return hashlib.sha256(text.encode()).digest()

    def _refusal(self, least: tuple[int, int]) -> InvalidArgumentError:
        total, ends = map(format_bytes, least)
        return InvalidArgumentError(
            argument="budget",
            expected=f"at least {total} ({least[0]} bytes), which the compiled region "
            f"{joint_graph.region_name()} holds between forward and backward, {ends} of them its inputs and outputs",
            got=f"{format_bytes(self.budget_bytes)}. Raise the budget, or make the batch smaller",
        )

    def _refuse_cuda_graphs(self) -> None:
        if joint_graph.captures_cuda_graphs():
            raise CombinationError(
                ours="vdnn.compile_options",
                theirs="the CUDA graphs of torch.compile",
                reason="under this budget values are offloaded, and a captured graph cannot move them",
                way_out="Compile without CUDA graphs, set offload=False, or raise the budget",
            )


@functools.cache
def hash_of_code(package: Path) -> str:
    """Differs with every line of the package and its native core: each may change a cut, whatever its version."""
    found = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.glob("_C.*")]):
        code = path.read_bytes()
        found.update(f"{path.relative_to(package)} {len(code)} ".encode() + code)
    return found.hexdigest()


def _budget_bytes(budget: int | str) -> int:
    size: object = parse_bytes(budget) if isinstance(budget, str) else budget
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise InvalidArgumentError(argument="budget", expected='bytes or a text such as "12GiB"', got=repr(budget))
    return size


def _profile(hardware: str | Path | HardwareProfile | None) -> HardwareProfile:
    if isinstance(hardware, HardwareProfile):
        return hardware
    if hardware is not None:
        return load_profile(hardware)
    if not torch.cuda.is_available():
        expected = "the name of a profile on a machine without a card, as in hardware='h100'"
        raise InvalidArgumentError(argument="hardware", expected=expected, got="None")
    from vdnn.runtime.machine.measured_hardware import measured_profile

    return measured_profile()


def _check_alone(options: Mapping[str, Any]) -> None:
    given = options.get(_OPTION)
    if isinstance(given, BudgetPartitioner):
        raise CombinationError(
            ours="vdnn.compile_options",
            theirs="options that it made",
            reason="a region has one budget",
            way_out="Call it once, with the other options as options=",
        )
    setting = f"options[{_OPTION!r}]" if given is not None else joint_graph.other_partitioner()
    if setting:
        raise CombinationError(
            ours="vdnn.compile_options",
            theirs=setting,
            reason="both decide what forward saves",
            way_out="Remove one of them",
        )


# The cuts of a compiled region that are tried under a budget, and the plan of each one that fits.
#
# Torch's own min-cut is tried first; if it fits, nothing else is tried. Then come torch's min-cuts that recompute more,
# torch's own knapsack where it fits, and searches that choose the operations to recompute for the min-cut: enough for
# the budget, or for half of it if the rest is offloaded.

# A try solves one min-cut, whose time grows with the graph. So large graphs get fewer tries, by count and not by clock,
# so that every run makes the same choice.
_NODES_TRIED, _FEWEST_TRIES, _MOST_TRIES = 20_000, 4, 24
_CAPACITIES = 5
# Torch's knapsack is tried at these shares of its budget.
KNAPSACK_SHARES = (0.8, 0.6, 0.4, 0.2)


class RegionCuts:
    """Cuts of one joint graph. Those that depend on no budget are made once."""

    def __init__(self, joint: fx.GraphModule, inputs: Any, num_fwd_outputs: int, options: dict[str, Any]) -> None:
        self._given = (joint, inputs, num_fwd_outputs, options)
        self._nodes = len(joint.graph.nodes)
        self._knapsacks: dict[float, Cut] = {}
        self._trials: dict[frozenset[str], CutTrial] = {}

    @functools.cached_property
    def plain(self) -> Cut:
        """The cut that torch makes by itself."""
        return joint_graph.min_cut(*self._given)

    @functools.cached_property
    def lean(self) -> Cut:
        return joint_graph.lean_cut(*self._given)

    @functools.cached_property
    def aggressive(self) -> Cut:
        return joint_graph.aggressive_cut(*self._given)

    def knapsack(self, share: float) -> Cut:
        """Torch's cut under `activation_memory_budget`, by its own solver and estimate of time."""
        if share not in self._knapsacks:
            self._knapsacks[share] = joint_graph.budgeted_cut(*self._given, share)
        return self._knapsacks[share]

    def fitting_knapsack(self, budget_bytes: int) -> Cut | None:
        """That of the largest share that fits. Less share does not always hold less, so they are tried in turn."""
        cuts = (self.knapsack(share) for share in KNAPSACK_SHARES)
        return next((cut for cut in cuts if cut.held.total_bytes <= budget_bytes), None)

    def searched(self, budget_bytes: int, cost: GraphCost) -> Cut:
        """The cut that a search finds whose operations take the least time to recompute under `budget_bytes`."""
        search = _CutSearch(budget_bytes, cost, self._nodes)

        def choose(
            candidates: Sequence[fx.Node], attempt: Callable[[frozenset[fx.Node]], CutTrial]
        ) -> frozenset[fx.Node]:
            return search.choose(candidates, lambda chosen: self._tried(chosen, attempt))

        return joint_graph.chosen_cut(*self._given, choose)

    def _tried(self, chosen: frozenset[fx.Node], attempt: Callable[[frozenset[fx.Node]], CutTrial]) -> CutTrial:
        """The trial of a set, made once for all budgets: each copy of the joint graph has the same names."""
        names = frozenset(node.name for node in chosen)
        if names not in self._trials:
            self._trials[names] = attempt(chosen)
        return self._trials[names]


def plans_of(cuts: RegionCuts, planner: RegionPlanner) -> dict[str, RegionPlan]:
    """The plans that fit, by the names of their cuts."""
    if cuts.plain.held.total_bytes <= planner.budget_bytes:
        return _planned(planner, {"min-cut": cuts.plain})
    tried = {"min-cut": cuts.plain, "lean min-cut": cuts.lean, "aggressive min-cut": cuts.aggressive}
    knapsack = cuts.fitting_knapsack(planner.budget_bytes)
    if knapsack is not None:
        tried["knapsack"] = knapsack
    tried["search"] = cuts.searched(planner.budget_bytes, planner.cost)
    if planner.offloads:
        over_bytes = cuts.plain.held.total_bytes - planner.budget_bytes
        tried["search beside offloading"] = cuts.searched(planner.budget_bytes + over_bytes // 2, planner.cost)
    return _planned(planner, tried) or _planned(planner, {"least": cuts.searched(0, planner.cost)})


def least_of(cuts: RegionCuts, planner: RegionPlanner) -> tuple[int, int]:
    """The least budget that is certain to be met, and how much of it inputs and outputs take."""
    tried = (cuts.plain, cuts.lean, cuts.aggressive, cuts.searched(0, planner.cost))
    return min((planner.least_bytes(cut), cut.held.inputs_and_outputs_bytes) for cut in tried)


def _planned(planner: RegionPlanner, cuts: dict[str, Cut]) -> dict[str, RegionPlan]:
    plans = {name: planner.plan(cut) for name, cut in cuts.items()}
    return {name: plan for name, plan in plans.items() if plan is not None}


class _CutSearch:
    """Chooses operations to recompute: adds the cheapest per byte first, then removes those that are not needed."""

    def __init__(self, budget_bytes: int, cost: GraphCost, nodes: int) -> None:
        self._budget_bytes, self._cost = budget_bytes, cost
        self._tries = min(_MOST_TRIES, max(_FEWEST_TRIES, _NODES_TRIED // max(nodes, 1)))

    def choose(
        self, candidates: Sequence[fx.Node], attempt: Callable[[frozenset[fx.Node]], CutTrial]
    ) -> frozenset[fx.Node]:
        """The set to recompute, or all candidates if even that does not fit."""
        tried: dict[frozenset[fx.Node], tuple[bool, int, int]] = {}

        def rank(chosen: frozenset[fx.Node]) -> tuple[bool, int, int]:
            """A choice that fits comes first, with the least time first; the others follow by their bytes."""
            if chosen not in tried:
                trial = attempt(chosen)
                over = trial.held.total_bytes > self._budget_bytes
                recompute_ns = self._cost.recompute_ns(trial.recomputed, trial.in_backward)
                tried[chosen] = (over, trial.held.total_bytes if over else recompute_ns, len(chosen))
            return tried[chosen]

        nodes = sorted(candidates, key=lambda node: self._ns_per_byte(node))
        self._bisect([frozenset(nodes[:count]) for count in range(len(nodes) + 1)], rank)
        self._bisect(self._knapsacks(candidates), rank)
        best = min(tried, key=tried.__getitem__)
        if not tried[best][0]:
            for node in sorted(best, key=self._cost.alone_ns, reverse=True)[: self._tries]:
                rank(best - {node})
                best = min(tried, key=tried.__getitem__)
        return best

    def _bisect(
        self, choices: Sequence[frozenset[fx.Node]], rank: Callable[[frozenset[fx.Node]], tuple[bool, int, int]]
    ) -> None:
        """Tries the choices around the first that fits. It assumes that each choice holds less than the one before
        it."""
        first, last = 0, len(choices) - 1
        while first < last:
            middle = (first + last) // 2
            if rank(choices[middle])[0]:
                first = middle + 1
            else:
                last = middle
        rank(choices[first])

    def _knapsacks(self, candidates: Sequence[fx.Node]) -> list[frozenset[fx.Node]]:
        """Torch's knapsack with our times, at capacities from all to nothing."""
        sizes = [max(self._bytes(node), 1) for node in candidates]
        shares = [size / sum(sizes) for size in sizes]
        times = [float(max(self._cost.alone_ns(node), 1)) for node in candidates]
        capacities = [1 - step / _CAPACITIES for step in range(_CAPACITIES + 1)]
        return [
            frozenset(candidates[place] for place in joint_graph.knapsack(shares, times, capacity))
            for capacity in capacities
        ]

    def _ns_per_byte(self, node: fx.Node) -> float:
        return self._cost.alone_ns(node) / max(self._bytes(node), 1)

    def _bytes(self, node: fx.Node) -> int:
        leaves = tree_leaves(joint_graph.hinted(node))
        return sum(one.numel() * one.itemsize for one in leaves if isinstance(one, torch.Tensor))
