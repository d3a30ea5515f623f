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

POLICIES = ("vdnn-all", "vdnn-conv", "recompute-all")
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
        before = session.counters.storages, session.counters.discarded, session.counters.recomputes
        torch.manual_seed(number)
        x = torch.randn(3, 4, _WIDTH)
        with session:
            network(x).square().mean().backward()
            session.step()
        found.append([one.grad.clone() for one in network.parameters() if one.grad is not None])
        network.zero_grad()
        after = session.counters.storages, session.counters.discarded, session.counters.recomputes
        counted.append(tuple(now - then for now, then in zip(after, before, strict=True)))
    assert _are_equal(found, wanted)
    assert _watch(session).settling.is_expected
    assert len(set(counted)) == 1  # each step moves and recomputes what the policy did
    assert any(counted[0])


def test_a_settled_step_of_recompute_all_tries_nothing() -> None:
    session = _opened("recompute-all")
    _gradients(session, [3] * 5)
    recipes = session._engine.saves.recipes
    assert recipes is not None
    tried: list[object] = []
    run = recipes._proofs._run_trial
    recipes._proofs._run_trial = lambda *args: tried.append(args) or run(*args)  # type: ignore[method-assign]
    _gradients(session, [3] * 2)
    assert not tried
    _gradients(session, [2])  # a step of another size is logged, and there each value is tried
    assert tried


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_of_two_sizes_have_a_plan_each(policy: str) -> None:
    sizes = [3, 2] * 6
    session = _opened(policy)
    assert _are_equal(_gradients(session, sizes), _gradients(None, sizes))
    plans = _watch(session)._of_policy
    assert plans is not None
    assert sum(known.executor is not None for known in plans._known.values()) == 2
    assert _watch(session).settling.is_expected


@pytest.mark.parametrize("policy", ["vdnn-all", "recompute-all"])
def test_the_policy_decides_about_saves_that_its_plan_does_not_have(policy: str) -> None:
    steps = 0

    def at_times_more(network: nn.Module, made: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return (made.sin() * made).tanh() if steps in (5, 6) else made

    session = _opened(policy)
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


@pytest.mark.parametrize("is_seen", [False, True], ids=["unseen", "seen by autograd"])
def test_an_operand_may_be_written_to_for_the_first_time_in_a_settled_step(is_seen: bool) -> None:
    steps, were_settled = 0, False

    def write_biases(network: nn.Module, made: torch.Tensor) -> torch.Tensor:
        nonlocal steps, were_settled
        steps += 1
        if steps == 7:
            were_settled |= _watch(session).settling.followed is not None
        for module in network.modules():
            if isinstance(module, nn.Linear) and steps > 6:
                with torch.no_grad():
                    (module.bias if is_seen else module.bias.data).add_(1.0)
        return made

    session = _opened("recompute-all")
    found = _gradients(session, [3] * 9, write_biases)
    assert were_settled
    steps = 0
    assert _are_equal(found, _gradients(None, [3] * 9, write_biases))


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


@pytest.mark.parametrize("options", [{"recheck": 0}, {"tolerance": 1e-6}], ids=str)
def test_recompute_all_tries_each_step_where_nothing_rechecks(options: dict[str, object]) -> None:
    session = _opened("recompute-all", **options)
    assert isinstance(session._engine.steps, UnwatchedSteps)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_step_takes_more_than_the_one_under_the_policy_itself(policy: str) -> None:
    peaks = []
    with vdnn.VirtualMachine("titan-x") as machine:
        network = _network()
        limits = vdnn.Limits(offload_window="1KiB", reload_window="2KiB")
        session = vdnn.offload(policy, device=machine, min_bytes=0, limits=limits)
        with session:
            for _ in range(6):
                machine.reset_peak()
                network(torch.randn(3, 4, _WIDTH)).square().mean().backward()
                session.step()
                network.zero_grad()
                peaks.append(machine.peak_bytes)
    assert max(peaks[1:]) <= peaks[0]
