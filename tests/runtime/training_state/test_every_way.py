"""In every way that a training's state leaves the device, saved trainings go on and nothing grows."""

from __future__ import annotations

import contextlib
import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import open_fake_device
from tests.drawn import quick_and_full
from tests.fake_driver.control import LIVE_KINDS, FakeDriver
from tests.runtime.training_state.conftest import Manage, on_host, open_session
from tests.runtime.training_state.loops import OPTIMIZERS, Training, begin, same
from tests.runtime.training_state.test_lives import one_step, outcome, state_bytes
from tests.runtime.training_state.ways import options_for, ways
from vdnn.runtime.session.session import Session
from vdnn.runtime.training_state.homes import is_managed
from vdnn.runtime.training_state.parameters.away_parameter import away_of

pytestmark = pytest.mark.usefixtures("one_form_of_the_step")

ADAMW = OPTIMIZERS["adamw"]


@ways
def test_what_leaves_is_away_between_steps_and_back_behind_the_session(way: str, manage: Manage) -> None:
    wanted, training = begin(ADAMW), begin(ADAMW)
    options_for(way, wanted)
    options = options_for(way, training)
    objects, named = list(training.model.parameters()), dict(training.model.named_parameters())
    leaves = {"frozen": ["between.weight"], "all": list(named)}.get(way.split(", ")[-1 if "frozen" in way else 0], [])
    with manage(training.optimizer, **options) as session:
        for number in range(3):
            one_step(wanted)
            one_step(training)
            assert same(list(wanted.model.parameters()), list(training.model.parameters()))
            training.loss()  # steps what waits
            wanted.loss()
            known = {name: away_of(one) for name, one in named.items()}
            assert [name for name, away in known.items() if away is not None] == leaves
            # State that a deferred step makes leaves with the next step.
            assert on_host(training.optimizer) == state_bytes(training) or ("deferred" in way and not number)
        assert ("parameters: " in session.report()) == bool(leaves)
    assert all(one is other for one, other in zip(objects, training.model.parameters(), strict=True))
    assert {type(one) for one in objects} == {torch.nn.Parameter}
    assert not any(map(is_managed, objects))
    assert not any(one._backward_hooks or one._post_accumulate_grad_hooks for one in objects)
    assert on_host(training.optimizer) == 0
    for one in (wanted, training):
        one_step(one)
    assert same(outcome(wanted), outcome(training))


@ways
@pytest.mark.parametrize("what_is_loaded", ["weights first", "state first"])
def test_a_training_saved_in_the_middle_goes_on_in_plain_pytorch_and_back(
    way: str, what_is_loaded: str, manage: Manage
) -> None:
    """Saved inside of a session, where steps may wait; loaded where others wait, and saved in plain PyTorch."""

    def made() -> tuple[Training, dict[str, Any]]:
        training = begin(ADAMW)
        return training, options_for(way, training)

    def load(training: Training, weights: Any, state: Any) -> None:
        loads = [lambda: training.model.load_state_dict(weights), lambda: training.optimizer.load_state_dict(state)]
        for one in loads if what_is_loaded == "weights first" else reversed(loads):
            one()

    wanted, _ = made()
    for _ in range(9):
        one_step(wanted)

    first, options = made()
    saved = io.BytesIO()
    with manage(first.optimizer, **options):
        for _ in range(3):
            one_step(first)
        torch.save([first.model.state_dict(), first.optimizer.state_dict()], saved)
        one_step(first)  # what was saved is a copy
    saved.seek(0)
    plain, _ = made()
    load(plain, *torch.load(saved))
    plain.batches = made()[0].batches
    for _ in range(3):
        next(plain.batches)
    for _ in range(3):
        one_step(plain)

    back, options = made()
    with manage(back.optimizer, **options):
        for _ in range(2):
            one_step(back)
        load(back, plain.model.state_dict(), plain.optimizer.state_dict())
        back.batches = plain.batches
        back.found = [*first.found[:3], *plain.found]
        for _ in range(3):
            one_step(back)
        assert same(outcome(back), outcome(wanted))
    assert same(outcome(back), outcome(wanted))


def holdings(driver: FakeDriver, session: Session) -> dict[str, int]:
    """Counts what a session and its driver have: live objects and bytes, pinned memory, files, threads."""
    gc.collect()
    (transport,) = session._engine.transports.opened()
    return {
        **{kind: driver.live(kind) for kind in LIVE_KINDS},
        "pinned bytes": transport.pool.stats.pinned_bytes,
        "leased bytes": transport.pool.stats.live_bytes,
        "state bytes": transport.state_bytes,
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


@pytest.mark.slow
@quick_and_full("steps", 150, 1000)
@ways
def test_many_steps_hold_what_ten_do(way: str, steps: int, fake_driver: FakeDriver) -> None:
    training = begin(ADAMW)
    device = open_fake_device(fake_driver)
    session = open_session(device, training.optimizer, policy="keep", **options_for(way, training))
    with contextlib.closing(session), session:
        for _ in range(10):
            one_step(training)
        training.found.clear()
        before, objects = holdings(fake_driver, session), len(gc.get_objects())
        for step in range(steps):
            one_step(training)
            training.found.clear()
            if step % 50 == 49:
                assert holdings(fake_driver, session) == before, f"step {step}"
        assert len(gc.get_objects()) - objects < 100
    device.close()
