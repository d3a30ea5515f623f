"""vdnn-dyn: its passes in the paper's order, and the algorithm of each convolution where workspaces are known."""

from __future__ import annotations

import pytest

from tests.planning.policies.steps import CONVOLUTION, EVEN, made_plan, with_operations
from tests.planning.recordings import chain
from vdnn.errors import BudgetError
from vdnn.planning.footprint import interval_bytes
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.policies import PlanRequest
from vdnn.planning.policies.vdnn_dyn import ConvolutionAlgorithm, VdnnDyn
from vdnn.step.recording import Recording

LEAN, FAST = ConvolutionAlgorithm("implicit", 0, 1.0), ConvolutionAlgorithm("fft", 40, 0.5)
MIDDLE = ConvolutionAlgorithm("tiles", 15, 0.7)


def mixed() -> Recording:
    """Two storages that convolutions use, and three that other operations use."""
    return with_operations(chain([20, 20, 20, 20, 20]), [CONVOLUTION, "", CONVOLUTION, "", ""])


def peak_of(policy: str, recording: Recording) -> int:
    return max(interval_bytes(recording, made_plan(policy, recording).lifetimes))


def passed(recording: Recording, budget_bytes: int, planner: VdnnDyn | None = None) -> str:
    return (planner or VdnnDyn()).decide(PlanRequest(recording, EVEN, budget_bytes)).name


def test_the_first_pass_that_fits_is_taken() -> None:
    recording = mixed()
    conv, everything = peak_of("vdnn-conv", recording), peak_of("vdnn-all", recording)
    assert everything < conv < recording.peak_bytes
    assert passed(recording, recording.peak_bytes) == "none (p)"
    assert passed(recording, recording.peak_bytes - 1) == "conv (p)"
    assert passed(recording, conv) == "conv (p)"
    assert passed(recording, conv - 1) == "all (p)"
    assert passed(recording, everything) == "all (p)"


def test_a_pass_makes_the_plan_of_its_name() -> None:
    recording = mixed()
    for policy in ("vdnn-conv", "vdnn-all"):
        budget = peak_of(policy, recording)
        assert made_plan("vdnn-dyn", recording, budget).lifetimes == made_plan(policy, recording).lifetimes


def test_where_no_pass_fits_the_closest_is_taken() -> None:
    recording = mixed()
    budget = least_bytes(recording)
    assert budget < peak_of("vdnn-all", recording)
    assert made_plan("vdnn-dyn", recording, budget).lifetimes == made_plan("vdnn-all", recording).lifetimes
    with pytest.raises(BudgetError):
        made_plan("vdnn-dyn", recording, budget - 1)


def test_of_no_budget_everything_is_fast_and_stays() -> None:
    planner = VdnnDyn(algorithms={2: (LEAN, FAST)})
    decided = planner.decide(PlanRequest(mixed(), EVEN, None))
    assert decided.name == "none (p)"
    assert decided.algorithms == {2: FAST}


def test_each_convolution_falls_back_to_the_fastest_that_fits() -> None:
    recording = mixed()
    large = ConvolutionAlgorithm("large", 60, 0.4)
    planner = VdnnDyn(algorithms={2: (LEAN, FAST, MIDDLE), 4: (LEAN, FAST, MIDDLE), 6: (LEAN, large)})
    conv = interval_bytes(recording, made_plan("vdnn-conv", recording).lifetimes)
    everything = interval_bytes(recording, made_plan("vdnn-all", recording).lifetimes)
    budget = max(conv)
    # The large one does not fit even with everything offloaded. With convolutions offloaded, one of the two others
    # does.
    assert everything[6] + large.workspace_bytes > budget
    assert conv[2] + FAST.workspace_bytes <= budget
    assert conv[4] + MIDDLE.workspace_bytes <= budget < conv[4] + FAST.workspace_bytes
    decided = planner.decide(PlanRequest(recording, EVEN, budget))
    assert decided.algorithms == {2: FAST, 4: MIDDLE, 6: LEAN}
    assert decided.name == "conv (greedy)"
    assert decided.peak_bytes <= budget


def test_all_with_the_fastest_goes_before_conv_with_slower_ones() -> None:
    recording = mixed()
    planner = VdnnDyn(algorithms={5: (LEAN, FAST)})
    conv, everything = peak_of("vdnn-conv", recording), peak_of("vdnn-all", recording)
    peaks = interval_bytes(recording, made_plan("vdnn-all", recording).lifetimes)
    budget = max(conv, everything, peaks[5] + FAST.workspace_bytes)
    assert passed(recording, budget, planner) == "all (p)"


def test_a_budget_for_the_leanest_algorithms_only_takes_them() -> None:
    recording = mixed()
    everything = peak_of("vdnn-all", recording)
    peaks = interval_bytes(recording, made_plan("vdnn-all", recording).lifetimes)
    where = peaks.index(everything)
    planner = VdnnDyn(algorithms={where: (FAST, LEAN)})
    decided = planner.decide(PlanRequest(recording, EVEN, everything))
    assert decided.name == "all (greedy)"
    assert decided.algorithms == {where: LEAN}


def test_workspaces_that_nothing_can_do_without_are_in_the_error() -> None:
    recording = mixed()
    heavy = ConvolutionAlgorithm("only", 1000, 1.0)
    with pytest.raises(BudgetError) as refused:
        VdnnDyn(algorithms={2: (heavy,)}).plan(PlanRequest(recording, EVEN, recording.peak_bytes - 1))
    assert refused.value.least_bytes >= 1000
