"""Steps under a policy that decides alike in each of them: one is observed, and the native gate serves those that
repeat it, with the same moves. A step that differs goes on as if nothing was planned."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.rigs.settled_steps import CHANGES, LAYERS, Change, Network, RecomputableNetwork, settling_of
from tests.runtime.rigs.side_by_side import alive, same_bits
from tests.runtime.steps.test_settled_steps import CALLED_BY_THE_GATE, python_calls
from vdnn import _C
from vdnn.planning.policies import OnlinePolicy, SaveFacts
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.recompute.trial import Trial
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.counters import Counters, Kept

POLICIES = ("vdnn-all", "recompute-all")
_WINDOWS = {"offload_window": "20KiB", "reload_window": "40KiB"}
# Observed, learned twice, and for recipes rechecked twice; with one to spare.
_SETTLED_WITHIN = {"vdnn-all": 4, "vdnn-conv": 4, "recompute-all": 5}


class Everything(OnlinePolicy):
    """As vdnn-all, but asked at every save."""

    def __init__(self) -> None:
        self.asked = 0

    @property
    def name(self) -> str:
        return "everything"

    def offloads(self, save: SaveFacts) -> bool:
        self.asked += 1
        return True


@contextlib.contextmanager
def opened(policy: str | OnlinePolicy, **options: Any) -> Iterator[Session]:
    device: Any = _C.OrderingChecker(_C.SimDevice(seed=3))
    session = vdnn.offload(policy, device=device, min_bytes=0, limits=vdnn.Limits(**_WINDOWS), **options)
    with session:
        yield session
    assert not any(alive(session).values())
    session.close()
    device.close()
    assert device.take_violations() == []


def network_for(policy: str | OnlinePolicy) -> Network:
    return RecomputableNetwork() if policy == "recompute-all" else Network()


def settle(session: Session, network: Network, policy: str) -> None:
    for _ in range(_SETTLED_WITHIN[policy]):
        network.step()
        session.step()
    assert settling_of(session).is_expected


def counted(session: Session, network: Network) -> dict[str, int]:
    """The counts that one more step adds."""
    before = dataclasses.replace(session.counters)
    network.step()
    session.step()
    names = [one.name for one in dataclasses.fields(Counters) if isinstance(getattr(before, one.name), int)]
    return {name: getattr(session.counters, name) - getattr(before, name) for name in names}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_session_without_a_budget_settles_and_shows_no_plan(policy: str) -> None:
    network = network_for(policy)
    with opened(policy) as session:
        settle(session, network, policy)
        assert session.plan is None
        assert session.recording is None
        assert session.num_steps == _SETTLED_WITHIN[policy]
        assert "differs from the plan" not in session.report()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_repeats_has_the_bits_of_plain_torch(policy: str) -> None:
    network = network_for(policy)
    plain = network.step()
    with opened(policy) as session:
        for _ in range(12):
            assert all(map(same_bits, network.step(), plain))
            session.step()
        assert settling_of(session).is_expected


def test_a_step_that_repeats_has_the_moves_of_a_step_whose_policy_is_asked_at_every_save() -> None:
    asked, network = Everything(), Network()
    with opened(asked) as session:
        usual = [counted(session, network) for _ in range(3)][-1]
    assert usual["prefetched_reloads"] > LAYERS // 2
    assert usual["freed_bytes"]
    with opened("vdnn-all") as session:
        steps = [counted(session, network) for _ in range(8)]
        assert settling_of(session).is_expected
    assert steps == [usual] * 8


def test_a_settled_step_of_vdnn_all_runs_no_python() -> None:
    network = Network()
    with opened("vdnn-all") as session:
        settle(session, network, "vdnn-all")
        with python_calls() as called:
            network.step()
        assert called.count("pack") == 1  # the first save
        # A source whose graph is freed while its copy is in flight is Python's.
        assert not set(CALLED_BY_THE_GATE).intersection(called).difference({"_make_source"})


def test_a_settled_step_of_recompute_all_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network, tried, run = RecomputableNetwork(), [], Trial.run

    def noted(trial: Trial) -> torch.Tensor:
        tried.append(trial)
        return run(trial)

    monkeypatch.setattr(Trial, "run", noted)
    with opened("recompute-all") as session:
        settle(session, network, "recompute-all")
        tried.clear()
        added = counted(session, network)
    assert added["discarded"] > LAYERS
    assert LAYERS < added["recomputes"] <= added["discarded"]
    assert not tried


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CHANGES)
def test_a_step_that_differs_has_the_bits_of_plain_torch_and_later_ones_settle_again(name: str, policy: str) -> None:
    network, other = network_for(policy), network_for(policy)
    usual = other.step()
    with opened(policy) as session:
        settle(session, network, policy)
        for at in (0, LAYERS // 2, LAYERS - 1):
            change = Change(name, at)
            wanted = other.step(change)
            assert all(map(same_bits, network.step(change), wanted))
            session.step()
            assert all(map(same_bits, network.step(), usual))
            session.step()
        for _ in range(12):
            network.step()
            session.step()
        assert settling_of(session).is_expected


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_whose_sizes_take_turns_are_each_observed_once(policy: str) -> None:
    networks = [network_for(policy) for _ in range(3)]
    for number, network in enumerate(networks):
        network.x = network.x[: 64 - 8 * number]
    plain = [network.step() for network in networks]
    with opened(policy) as session:
        served = []
        for _ in range(9):
            for network, wanted in zip(networks, plain, strict=True):
                assert all(map(same_bits, network.step(), wanted))
                session.step()
                served.append(settling_of(session).is_expected)
        assert all(served[-6:])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("at", ["forward", "backward"])
def test_an_exception_leaves_the_next_step_working(at: str, policy: str) -> None:
    network = network_for(policy)
    plain = network.step()

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("planned")

    def failing_step() -> None:
        y = network.x
        for number, weight in enumerate(network.weights):
            y = network.layer(y, number, weight, "")
            if at == "backward" and number == LAYERS // 2:
                y.register_hook(fail)
            if at == "forward" and number == LAYERS // 2:
                fail(y)
        y.square().mean().backward()

    with opened(policy) as session:
        settle(session, network, policy)
        with pytest.raises(ArithmeticError, match="planned"):
            failing_step()
        session.step()
        for _ in range(2 * _SETTLED_WITHIN[policy]):
            assert all(map(same_bits, network.step(), plain))
            session.step()
        assert settling_of(session).is_expected


@pytest.mark.parametrize("is_second_order", [True, False], ids=["create_graph", "retain_graph"])
def test_a_gradient_that_is_asked_for_first_may_end_the_step_in_a_chain_of_recomputes(is_second_order: bool) -> None:
    """As a penalty on gradients in every 16th step: from its first use on, what the gate discarded is Python's."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.LayerNorm(24)) for _ in range(3)]
    model, batch = nn.Sequential(*blocks), torch.randn(32, 24)

    def step(*, has_penalty: bool) -> list[torch.Tensor | None]:
        model.zero_grad()
        x = batch.clone().requires_grad_()
        y = model(x)
        loss = y.square().mean()
        if has_penalty:
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=is_second_order, retain_graph=True)
            loss = loss + (gradient * gradient).mean()
        loss.backward()
        return [x.grad, *(one.grad for one in model.parameters())]

    expected = [step(has_penalty=number == 6) for number in range(9)]
    with opened("recompute-all") as session:
        found = []
        for number in range(9):
            assert settling_of(session).is_expected or number != 6
            found.append(step(has_penalty=number == 6))
            session.step()
        assert session.counters.recomputes
    assert all(all(map(same_bits, one, other)) for one, other in zip(found, expected, strict=True))


def test_steps_that_differ_each_time_are_not_observed_for_ever() -> None:
    network, sizes = Network(), iter(range(1, 100))

    def step() -> None:
        """The first save is the same in each step, and so are the operations, but not the sizes behind it."""
        y = torch.tanh(network.x @ network.weights[0])[: next(sizes) % 13 + 1]
        for weight in network.weights[1:]:
            y = torch.tanh(y @ weight)
        y.sum().backward()

    with opened("vdnn-all") as session:
        for _ in range(20):
            step()
            session.step()
        steps: Any = session._engine.steps
        (repeated,) = steps._plans._repeated._repeated.values()
        assert repeated.executor is None
        assert repeated.failures == 3


def test_a_step_that_differs_stays_within_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network()
    with opened("vdnn-all") as session:
        settle(session, network, "vdnn-all")
        (transport,) = session._engine.transports.opened()
        flights: list[int] = []
        layer = network.layer

        def noted(y: torch.Tensor, number: int, weight: torch.Tensor, change: str) -> torch.Tensor:
            made = layer(y, number, weight, change)
            flights.append(transport.queue.stats.offload_in_flight_bytes)
            made.register_hook(lambda _: flights.append(transport.queue.stats.reload_in_flight_bytes))
            return made

        monkeypatch.setattr(network, "layer", noted)
        for name in ("an extra save", "a missing use", "a missing layer"):
            network.step(Change(name, LAYERS // 2))
            session.step()
        assert 0 < max(flights) <= 40 << 10


class LargeOnes(OnlinePolicy):
    """A policy of the user's, which changes its mind."""

    def __init__(self) -> None:
        self.least, self.seen = 1 << 12, 0

    @property
    def name(self) -> str:
        return "large-ones"

    def offloads(self, save: SaveFacts) -> bool:
        self.seen += 1
        return save.storage_bytes >= self.least


def test_a_policy_of_the_user_decides_in_every_step() -> None:
    policy, network = LargeOnes(), Network()
    with opened(policy) as session:
        added = [counted(session, network) for _ in range(6)]
        assert {one["storages"] for one in added} == {LAYERS + 1}
        asked = policy.seen
        policy.least = 1 << 20
        assert counted(session, network)["storages"] == 0
        assert policy.seen > asked


def test_what_vdnn_conv_keeps_is_counted_as_kept_by_the_policy() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()]
    model, x = nn.Sequential(*layers), torch.randn(2, 4, 8, 8)
    with opened("vdnn-conv") as session:
        for _ in range(_SETTLED_WITHIN["vdnn-conv"] + 2):
            model(x).square().sum().backward()
            session.step()
        assert settling_of(session).is_expected
        assert session.counters.kept[Kept.POLICY]
        assert not session.counters.kept[Kept.PLAN]
        assert session.counters.storages


def test_a_recipe_that_a_write_behind_autograd_spoils_is_not_followed() -> None:
    """Each step writes to a weight between its forward and its backward, and no version counter shows it."""
    torch.manual_seed(0)
    x, first, second = torch.randn(8, 16), torch.randn(16, requires_grad=True), torch.randn(16, requires_grad=True)

    def step() -> torch.Tensor:
        for weight in (first, second):
            weight.grad = None
        loss = ((x * first).tanh() * second).tanh().square().sum()
        second.data.mul_(1.5)
        loss.backward()
        second.data.mul_(1 / 1.5)
        assert first.grad is not None
        return first.grad

    with torch.no_grad():
        second.fill_(0.5)
    wanted = step()
    with opened("recompute-all") as session:
        for _ in range(8):
            assert same_bits(step(), wanted)
            session.step()
        assert session.counters.discarded


@pytest.mark.parametrize("fake", [True, False], ids=["without data", "with data"])
def test_in_virtual_time_a_step_takes_what_it_takes_when_its_policy_is_asked(fake: bool) -> None:
    taken = {}
    for policy in (Everything(), "vdnn-all"):
        with VirtualMachine("titan-x", fake=fake) as machine:
            model = nn.Sequential(*(one for _ in range(8) for one in (nn.Linear(512, 512), nn.GELU())))
            x = torch.randn(1024, 512)
            limits = vdnn.Limits(offload_window="4MiB", reload_window="4MiB")
            with vdnn.offload(policy, device=machine, min_bytes=0, limits=limits) as session:
                steps = []
                for _ in range(6):
                    before_ns = machine.now_ns
                    machine.reset_peak()
                    model(x).square().sum().backward()
                    session.step()
                    steps.append((machine.now_ns - before_ns, machine.peak_bytes))
            taken[str(policy)] = steps, session.counters.prefetched_reloads
    asked, repeated = taken.values()
    assert asked == repeated
    assert asked[1]
