"""The count of steps over their budget, with the causes, in the report and in the log."""

from __future__ import annotations

import logging

import pytest

import vdnn
from tests.runtime.rigs.networks import perceptron
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.steps.measurement import BudgetLedger, Over


def test_the_report_counts_the_steps_and_the_causes(caplog: pytest.LogCaptureFixture) -> None:
    ledger = BudgetLedger()
    assert ledger.lines() == []
    with caplog.at_level(logging.WARNING, logger="vdnn"):
        for peak_bytes, cause in [(90, Over.NO_PLAN), (130, Over.NO_PLAN), (140, Over.NO_PLAN), (110, Over.DIFFERED)]:
            ledger.micro_batch_ended(peak_bytes << 20, 100 << 20, cause)
            ledger.micro_batch_ended(80 << 20, 100 << 20, Over.ANOTHER_PLAN)
            ledger.step_ended()
    assert ledger.lines() == [
        "  budget 100.00 MiB: 1 of 4 steps within, 3 over, worst 140.00 MiB (2 ran before there was a plan for it; 1 "
        "differed from its plan)"
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "vdnn: a step took 130.00 MiB, 30.00 MiB more than its budget: it ran before there was a plan for it. "
        "session.report() counts such steps.",
        "vdnn: a step took 110.00 MiB, 10.00 MiB more than its budget: it differed from its plan. session.report() "
        "counts such steps.",
    ]


def test_a_step_of_exactly_its_budget_is_within() -> None:
    ledger = BudgetLedger()
    ledger.micro_batch_ended(100 << 20, 100 << 20, Over.NO_PLAN)
    ledger.step_ended()
    assert ledger.lines() == ["  budget 100.00 MiB: all of 1 steps within"]


def test_a_session_says_what_was_asked_for_and_how_its_steps_went() -> None:
    with VirtualMachine("titan-x", fake=False) as machine:
        model = perceptron(64, 12)
        x = model[0].weight.new_zeros(256, 64)
        with vdnn.offload(budget="900KiB", device=machine, min_bytes=0) as session:
            before = session.report()
            for _ in range(4):
                model(x).square().sum().backward()
        after = session.report()
    assert before.startswith("policy auto, budget 900.00 KiB; until its plan: vdnn-all for what does not fit: 0 ")
    assert after.startswith("policy auto, budget 900.00 KiB: ")
    assert "  budget 900.00 KiB: " in after
    assert " steps within" in after
