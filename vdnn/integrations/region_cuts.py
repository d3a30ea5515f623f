"""The cuts of a compiled region that are tried under a budget, and the plan of each one that fits.

Torch's own min-cut comes first, and alone if it fits. Behind it come torch's min-cuts with more recomputed, torch's own
knapsack where it fits, and searches that tell the min-cut what to recompute: as much as the budget asks for, or half of
it beside offloading.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from vdnn.integrations.region_plan import RegionPlan, RegionPlanner
from vdnn.runtime.machine.graph_cost import GraphCost
from vdnn.runtime.torch_internals import joint_graph
from vdnn.runtime.torch_internals.joint_graph import Cut, Trial

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
        self._trials: dict[frozenset[str], Trial] = {}

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
        search = _Search(budget_bytes, cost, self._nodes)

        def choose(candidates: Sequence[fx.Node], attempt: Callable[[frozenset[fx.Node]], Trial]) -> frozenset[fx.Node]:
            return search.choose(candidates, lambda chosen: self._tried(chosen, attempt))

        return joint_graph.chosen_cut(*self._given, choose)

    def _tried(self, chosen: frozenset[fx.Node], attempt: Callable[[frozenset[fx.Node]], Trial]) -> Trial:
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


class _Search:
    """Looks for the operations to recompute: those with the least time a byte first, then without what need not be."""

    def __init__(self, budget_bytes: int, cost: GraphCost, nodes: int) -> None:
        self._budget_bytes, self._cost = budget_bytes, cost
        self._tries = min(_MOST_TRIES, max(_FEWEST_TRIES, _NODES_TRIED // max(nodes, 1)))

    def choose(
        self, candidates: Sequence[fx.Node], attempt: Callable[[frozenset[fx.Node]], Trial]
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
        """Tries the choices around the first that fits, as if each held less than the one before it."""
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
