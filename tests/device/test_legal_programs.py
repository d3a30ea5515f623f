"""On legal programs the checker reports nothing, and every device leaves the same bytes as running them in order."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.conftest import SCHEDULE_IDS, SCHEDULES, open_fake_device
from tests.device.legal_programs import Program, Step, steps
from tests.fake_driver.control import FakeDriver
from vdnn import _C, errors

pytestmark = pytest.mark.slow

PROGRAMS = 1_000


@pytest.mark.drawn(of=3)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=SCHEDULE_IDS)
def test_the_checker_is_silent_on_a_thousand_legal_programs(schedule: _C.Schedule) -> None:
    checked = 0

    @settings(max_examples=PROGRAMS, suppress_health_check=[HealthCheck.too_slow])
    @given(program=steps())
    def run(program: list[Step]) -> None:
        nonlocal checked
        device = _C.OrderingChecker(_C.SimDevice(schedule=schedule, seed=len(program)))
        played = Program(device)
        played.run(program)
        assert played.differences() == []
        checked += device.checked_accesses
        device.close()

    run()
    assert checked > PROGRAMS  # a checker that saw no accesses would report nothing either


@pytest.mark.parametrize("held", [False, True], ids=["early", "late"])
def test_the_cuda_path_runs_legal_programs_in_order(fake_driver: FakeDriver, held: bool) -> None:
    fake_driver.hold_streams(held)

    @settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
    @given(program=steps())
    def run(program: list[Step]) -> None:
        device = _C.OrderingChecker(open_fake_device(fake_driver))
        played = Program(device)
        played.run(program)
        assert played.differences() == []
        device.close()

    run()


def test_a_program_without_its_waits_is_caught() -> None:
    """The same generator without its waits must give illegal programs, or a silent checker would prove nothing."""
    caught = 0

    class Careless(Program):
        def order(self, stream: _C.Stream, events: list[_C.Event], way: str) -> None:
            pass

    @settings(max_examples=200)
    @given(program=steps())
    def run(program: list[Step]) -> None:
        nonlocal caught
        device = _C.OrderingChecker(_C.SimDevice(schedule=_C.Schedule.RANDOM))
        try:
            Careless(device).run(program)
        except errors.OrderingError:
            caught += 1
        device.close()

    run()
    assert caught > 20
