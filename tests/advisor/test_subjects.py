"""vdnn advise takes the subjects that vdnn plan takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.runtime.rehearsal import programs
from vdnn.advisor.evidence import Evidence
from vdnn.advisor.parts import WorkloadTraining
from vdnn.hardware import load_profile
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of

H100 = load_profile("h100")
OTHERS = (programs.converted, programs.with_optimizer, programs.with_optimizer_and_loss, programs.WholeStep)


@pytest.mark.parametrize("make", [*programs.SAME_AS_PLAIN, *OTHERS], ids=lambda make: make.__name__)
def test_advise_rehearses_the_step_that_plan_rehearses(make: Callable[[int], Any]) -> None:
    base = Evidence(WorkloadTraining(make, 4096, name="subject"), H100).base
    planned = rehearse(subject_of(make, 4096), H100).recording
    assert abs(base.peak_bytes / planned.peak_bytes - 1) < 0.1
    assert abs(base.step_ns / planned.compute_ns - 1) < 0.1
