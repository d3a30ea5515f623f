"""Tests of the identity rig itself: it notices every failure that it is meant to find."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.runtime.identity import rig as room
from tests.runtime.identity.outcome import Outcome
from tests.runtime.identity.rig import NOTHING_TO_MOVE, IdentityRig, identity_rigs
from tests.runtime.identity.runs import Inputs, Mode, run_call
from vdnn import _C
from vdnn.runtime.session.limits import Limits
from vdnn.runtime.session.offload import offload
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.packed_view import PackedView


@pytest.fixture
def rig() -> Iterator[IdentityRig]:
    made = IdentityRig(_C.Schedule.LAZY)
    yield made
    made.close()


def square(inputs: Inputs = Inputs.FRESH) -> Outcome:
    tensor = torch.linspace(0.1, 1.7, 24, requires_grad=True)
    return run_call(torch.square, ((tensor,), {}), Mode.TWICE, inputs)


def test_a_call_that_is_the_same_has_no_failures(rig: IdentityRig) -> None:
    rig.compare("square", square, may_stay=NOTHING_TO_MOVE)
    assert rig.failures == []
    assert rig.compared == 1
    assert rig.counters.storages == 1 + 5, "the input, and of the nudges of three pairs all but the last"
    assert rig.counters.freed_bytes >= 24 * 4, "the input"


def test_a_last_bit_that_changes_on_the_way_is_a_failure(rig: IdentityRig, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = PackedView.unpack

    def off_by_one_bit(self: PackedView) -> torch.Tensor:
        tensor = unpack(self).detach().clone()
        tensor.view(torch.int32)[-1] ^= 1
        return tensor

    monkeypatch.setattr(PackedView, "unpack", off_by_one_bit)
    rig.compare("square", square)
    assert rig.failures == [
        f"square (lazy): not as in a plain run: {name} 0: 1 of 96 bytes differ"
        for name in ("gradient", "gradient again")
    ]


def test_an_error_that_only_the_session_raises_is_a_failure(rig: IdentityRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: PackedView) -> torch.Tensor:
        raise ValueError("lost")

    monkeypatch.setattr(PackedView, "unpack", broken)
    rig.compare("square", square)
    assert rig.failures == ["square (lazy): not as in a plain run: plain: no error; now: ValueError: lost"]


def test_a_call_that_differs_between_two_plain_runs_is_a_failure(rig: IdentityRig) -> None:
    scales = iter((1.0, 2.0))
    rig.compare("noise", lambda: run_call(lambda t: t * next(scales), ((torch.ones(2),), {}), Mode.ONCE))
    assert rig.failures == ["noise (lazy): two plain runs differ: value 0: 4 of 8 bytes differ"]


def test_a_save_that_stays_on_the_device_is_a_failure(rig: IdentityRig) -> None:
    rig.compare("square", functools.partial(square, Inputs.LEAVES), may_stay=NOTHING_TO_MOVE)
    assert rig.failures == [
        "square (lazy): not every save left and came back: stayed: a parameter or buffer, or a view of one"
    ]


def nothing_recorded(figure: str, value: object) -> None:
    pass


def test_rigs_to_which_no_call_gives_anything_to_move_are_sound() -> None:
    with identity_rigs(0, nothing_recorded) as rigs:
        rigs[0].compare("shape", lambda: run_call(torch.sign, ((torch.ones(2),), {}), Mode.ONCE))
    assert rigs[0].saved_nothing == ["shape"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"policy": "keep"}, "the control .*: not every save left and came back: stayed: the policy keeps it"),
        (
            {"limits": Limits(offload_window="1MiB")},
            "the control .*: not every save left and came back: 1 uses without a reload",
        ),
        ({"min_bytes": "1KiB"}, "nothing came back, not even of the control"),
    ],
)
def test_rigs_that_never_reload_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], complaint: str
) -> None:
    def useless(policy: str, **given: Any) -> Session:
        return offload(**{"policy": policy, **given, **options})

    monkeypatch.setattr(room, "offload", useless)
    with pytest.raises(AssertionError, match=complaint), identity_rigs(0, nothing_recorded):
        pass
