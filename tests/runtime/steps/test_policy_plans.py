"""Sessions of online policies follow the plan of what the policy did: steps settle, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import vdnn
from vdnn.planning.policies import OnlinePolicy, SaveFacts
from vdnn.runtime.session.session import Session
from vdnn.runtime.steps.steps import StepWatch, UnwatchedSteps
from vdnn.runtime.storage.counters import Kept

POLICIES = ("vdnn-all", "vdnn-conv")
_WIDTH = 16


class OfGelu(OnlinePolicy):
    """A user's policy: offloads what GELU saves."""

    @property
    def name(self) -> str:
        return "of GELU"

    def offloads(self, save: SaveFacts) -> bool:
        return save.module_kind == "GELU"


def _network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.GELU(), nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH))
        for _ in range(4)
    ]
    return nn.Sequential(*blocks)


def _opened(policy: str | OnlinePolicy, **options: object) -> Session:
    limits = vdnn.Limits(offload_window="1KiB", reload_window="2KiB")
    return vdnn.offload(policy, device="sim", min_bytes=0, limits=limits, **options)  # type: ignore[arg-type]


def _watch(session: Session) -> StepWatch:
    steps = session._engine.steps
    assert isinstance(steps, StepWatch)
    return steps


Between = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def _gradients(
    session: Session | None, sizes: list[int], between: Between = lambda network, made: made
) -> list[list[torch.Tensor]]:
    """The gradients of a step for each size. `between` runs behind the forward pass."""
    network, found = _network(), []
    for number, size in enumerate(sizes):
        torch.manual_seed(number)
        x = torch.randn(size, 4, _WIDTH)
        if session is None:
            between(network, network(x)).square().mean().backward()
        else:
            with session:
                between(network, network(x)).square().mean().backward()
                session.step()
        found.append([one.grad.clone() for one in network.parameters() if one.grad is not None])
        network.zero_grad()
    return found


def _are_equal(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) for mine, its in pairs for a, b in zip(mine, its, strict=True))


@pytest.mark.parametrize("policy", [*POLICIES, OfGelu()], ids=[*POLICIES, "a policy of the user"])
def test_later_steps_of_an_online_policy_are_served_by_the_gate(policy: str | OnlinePolicy) -> None:
    session = _opened(policy)
    counted = []
    wanted = _gradients(None, [3] * 7)
    found = []
    network = _network()
    for number in range(7):
        before = session.counters.storages, session.counters.prefetched_reloads
        torch.manual_seed(number)
        x = torch.randn(3, 4, _WIDTH)
        with session:
            network(x).square().mean().backward()
            session.step()
        found.append([one.grad.clone() for one in network.parameters() if one.grad is not None])
        network.zero_grad()
        after = session.counters.storages, session.counters.prefetched_reloads
        counted.append(tuple(now - then for now, then in zip(after, before, strict=True)))
    assert _are_equal(found, wanted)
    assert _watch(session).settling.is_expected
    assert len(set(counted)) == 1  # each step moves what the policy did
    assert any(counted[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_of_two_sizes_have_a_plan_each(policy: str) -> None:
    sizes = [3, 2] * 6
    session = _opened(policy)
    assert _are_equal(_gradients(session, sizes), _gradients(None, sizes))
    plans = _watch(session)._of_policy
    assert plans is not None
    assert sum(known.executor is not None for known in plans._known.values()) == 2
    assert _watch(session).settling.is_expected


def test_the_policy_decides_about_saves_that_its_plan_does_not_have() -> None:
    steps = 0

    def at_times_more(network: nn.Module, made: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return (made.sin() * made).tanh() if steps in (5, 6) else made

    session = _opened("vdnn-all")
    found = _gradients(session, [3] * 9, at_times_more)
    steps = 0
    assert _are_equal(found, _gradients(None, [3] * 9, at_times_more))
    assert not session.counters.kept[Kept.PLAN]
    assert not session.counters.kept[Kept.POLICY]


def test_a_step_that_keeps_differing_is_left_to_the_policy() -> None:
    steps = 0

    def each_time_another(network: nn.Module, made: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        for _ in range(steps % 5):
            made = made.sin()
        return made

    session = _opened("vdnn-all")
    found = _gradients(session, [3] * 24, each_time_another)
    steps = 0
    assert _are_equal(found, _gradients(None, [3] * 24, each_time_another))
    assert session.counters.storages == session.counters.uses - session.counters.shared_saves


def test_saves_that_a_policy_keeps_are_reported_as_kept_by_it() -> None:
    session = _opened("vdnn-conv")
    _gradients(session, [3] * 6)
    kept = session.counters.kept[Kept.POLICY]
    assert kept > 0
    assert kept % 6 == 0
    assert not session.counters.kept[Kept.PLAN]
    assert session.plan is None
    assert "follows a plan" not in session.report()
    assert session.report().startswith("policy vdnn-conv: ")


def test_recompute_all_tries_each_value_in_each_step() -> None:
    """A value may be right in one step and not in a later one, if the program writes behind autograd."""
    assert isinstance(_opened("recompute-all")._engine.steps, UnwatchedSteps)


@pytest.mark.parametrize("policy", POLICIES)
def test_later_steps_move_when_the_policy_did(policy: str) -> None:
    """The storages of ReLU are saved twice."""
    seen = []
    with vdnn.VirtualMachine("titan-x") as machine:
        network = nn.Sequential(*(nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(8)))
        x = torch.randn(64, 4, 1024)
        limits = vdnn.Limits(offload_window="2MiB", reload_window="4MiB")
        with vdnn.offload(policy, device=machine, min_bytes=0, limits=limits) as session:
            counters = session.counters
            for _ in range(6):
                machine.reset_peak()
                before = counters.storages, counters.prefetched_reloads, counters.demand_reloads
                begin_ns = machine.now_ns
                network(x).square().mean().backward()
                session.step()
                network.zero_grad()
                after = counters.storages, counters.prefetched_reloads, counters.demand_reloads
                counted = tuple(now - then for now, then in zip(after, before, strict=True))
                seen.append((machine.peak_bytes, machine.now_ns - begin_ns, counted))
    first = seen[0]
    assert any(first[2])
    for peak_bytes, taken_ns, counted in seen[1:]:
        assert counted == first[2]
        assert peak_bytes <= first[0]
        assert taken_ns <= first[1]
