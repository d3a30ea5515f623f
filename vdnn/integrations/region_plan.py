"""Plans one cut of a compiled region: the values that are offloaded, and the time of a step.

A cut says what is saved and what is recomputed. If it holds more than the budget, the planner of eager steps chooses
what leaves, with both copy engines of the card and every stall.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from vdnn.errors import BudgetError
from vdnn.hardware import HardwareProfile
from vdnn.integrations.compiled_moves import RegionMove, moves_of
from vdnn.planning.costs import profile_costs
from vdnn.planning.footprint import offload_everything
from vdnn.planning.policies.plan_policy import PlanRequest
from vdnn.planning.search.auto_offload import AutoOffload
from vdnn.planning.simulate import simulate
from vdnn.runtime.machine.graph_cost import GraphCost
from vdnn.runtime.machine.graph_step import GraphStep, graph_step
from vdnn.runtime.torch_internals import joint_graph
from vdnn.runtime.torch_internals.joint_graph import Cut
from vdnn.step.plan import Absence, Action, Plan, PlannedLifetime, make_plan

# A share of the full effort of the search for moves: that is meant for one plan, and here each tried cut gets one.
_EFFORT = 0.05


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """A cut with its moves. `held_bytes` are on the device between forward and backward, and `peak_bytes` is the most
    at any time: inputs, outputs, and what is saved or reloaded."""

    cut: Cut
    step: GraphStep
    moves: tuple[RegionMove, ...]
    step_ns: int
    peak_bytes: int

    @property
    def offloaded_bytes(self) -> int:
        return sum(move.nbytes for move in self.moves)

    @property
    def held_bytes(self) -> int:
        return self.cut.held.total_bytes - self.offloaded_bytes

    @property
    def needed_bytes(self) -> int:
        """The least budget that the plan fits."""
        return max(self.peak_bytes, self.held_bytes)


class RegionPlanner:
    """Plans cuts under one budget, on one card."""

    def __init__(self, budget_bytes: int, profile: HardwareProfile, *, offloads: bool = True) -> None:
        self.budget_bytes, self.offloads = budget_bytes, offloads
        self.cost = GraphCost(profile, joint_graph.is_fusible, joint_graph.hinted)
        self._costs = profile_costs(profile)

    def recompute_ns(self, cut: Cut) -> int:
        """The time of backward's recomputes."""
        return self.cost.recompute_ns(cut.recomputed, set(cut.backward.graph.nodes))

    def step_of(self, cut: Cut) -> GraphStep:
        """The cut as a recorded step, with everything kept."""
        times: dict[fx.Node, float] = {}
        for module in (cut.forward, cut.backward):
            times |= self.cost.node_ns(module.graph, joint_graph.is_view)
        ends_bytes = cut.held.inputs_and_outputs_bytes
        return graph_step(cut.forward.graph, cut.backward.graph, cut.saved, ends_bytes, times, joint_graph.is_view)

    def least_bytes(self, cut: Cut) -> int:
        """The least budget that the cut can meet: plan() finds a plan under it and under every larger one."""
        if not self.offloads:
            return cut.held.total_bytes
        return min(self._everything_away(cut, self.step_of(cut)).needed_bytes, cut.held.total_bytes)

    def plan(self, cut: Cut) -> RegionPlan | None:
        """The fastest step that was found, or None if the cut does not fit."""
        step = self.step_of(cut)
        recording = step.recording
        if cut.held.total_bytes <= self.budget_bytes:
            return RegionPlan(cut, step, (), recording.compute_ns, cut.held.total_bytes)
        if not self.offloads:
            return None
        try:
            plan = AutoOffload(_EFFORT).plan(PlanRequest(recording, self._costs, self.budget_bytes))
        except BudgetError:
            return None
        return self.replayed(cut, step, moves_of(step, plan)) or self._fitting(self._everything_away(cut, step))

    def replayed(self, cut: Cut, step: GraphStep, moves: Iterable[RegionMove]) -> RegionPlan | None:
        """The cut with these moves, or None if it is over the budget after all."""
        return self._fitting(self._simulated(cut, step, tuple(moves)))

    def _simulated(self, cut: Cut, step: GraphStep, moves: tuple[RegionMove, ...]) -> RegionPlan:
        timeline = simulate(step.recording, plan_of_moves(step, moves), self._costs)
        return RegionPlan(cut, step, moves, timeline.step_ns, timeline.peak_bytes)

    def _everything_away(self, cut: Cut, step: GraphStep) -> RegionPlan:
        """The cut with every value offloaded that can be."""
        plan = make_plan(step.recording, "everything", offload_everything(step.recording), None)
        return self._simulated(cut, step, tuple(moves_of(step, plan)))

    def _fitting(self, plan: RegionPlan) -> RegionPlan | None:
        return plan if plan.needed_bytes <= self.budget_bytes else None


def plan_of_moves(step: GraphStep, moves: Iterable[RegionMove]) -> Plan:
    """The moves as a plan of the recorded step."""
    by_name = {move.name: move for move in moves}
    lifetimes = []
    for lifetime, storage in zip(step.recording.lifetimes, step.storages, strict=True):
        move = by_name.get(storage.names[0])
        reload = None if move is None or move.reload_point == move.use_point else move.reload_point
        absences = () if move is None else (Absence(move.release_point, reload),)
        action = Action.KEEP if move is None else Action.OFFLOAD
        lifetimes.append(PlannedLifetime(lifetime.nbytes, action, absences))
    return make_plan(step.recording, "compiled", tuple(lifetimes), None)
