"""Advice on optimizers: the fused kernel for loops and foreach lists, and 8-bit libraries for a large state."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.advisor.programs import evidence_of, found, perceptron, training_of
from vdnn.advisor.advice import Kind
from vdnn.advisor.census import Census
from vdnn.advisor.change import Change
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.advisor.host_reads import HostReads
from vdnn.advisor.parts import WorkloadTraining
from vdnn.advisor.virtual_step import machine_aside, rehearse
from vdnn.hardware import load_profile
from vdnn.runtime.machine.virtual_machine import VirtualMachine

# A card of which libraries keep nothing: the steps here are smaller than what they keep.
H100 = replace(load_profile("h100"), libraries={})


def with_adam(**options: Any) -> Evidence:
    model = perceptron()
    return evidence_of(training_of(model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1, **options)), H100)


def test_a_loop_over_parameters_is_told_of_the_fused_kernel() -> None:
    evidence = with_adam(foreach=False)
    (advice,) = found(Kind.OPTIMIZER_FORM, evidence)
    plain = rehearse(evidence.training, H100, Change())
    fused = rehearse(evidence.training, H100, Change(fused=True))
    assert advice.gain.saved_ns == plain.step_ns - fused.step_ns > 0
    assert "Adam updates 8 parameters one parameter after the other" in advice.seen
    assert advice.action == "torch.optim.Adam(..., fused=True)"


def test_the_default_is_rehearsed_as_a_gpu_has_it() -> None:
    """The default on a GPU is foreach; on the CPU it is a loop."""
    default, lists = with_adam(), with_adam(foreach=True)
    assert default.base.step_ns == lists.base.step_ns < with_adam(foreach=False).base.step_ns
    (advice,) = found(Kind.OPTIMIZER_FORM, default)
    assert "in lists" in advice.seen


def test_a_fused_optimizer_is_not_advised() -> None:
    assert found(Kind.OPTIMIZER_FORM, with_adam(fused=True)) == []


def test_an_optimizer_without_a_fused_kernel_is_not_advised() -> None:
    model = perceptron()
    evidence = evidence_of(training_of(model, optimizer=torch.optim.RMSprop(model.parameters(), lr=0.1)))
    assert found(Kind.OPTIMIZER_FORM, evidence) == []


def test_steps_that_are_counted_on_the_host_take_no_time_of_the_card() -> None:
    with VirtualMachine(H100) as machine:
        model, kept = nn.Linear(4, 4), nn.Linear(4, 4).weight
        optimizer = torch.optim.Adam(model.parameters())
        count = torch.zeros(())
        optimizer.state[model.weight]["step"] = count
        with Census(model, optimizer, HostReads(), lambda: machine_aside(machine)) as census:
            census.begin_step()
            begin_ns = machine.now_ns
            count.add_(1)
            assert machine.now_ns == begin_ns
            kept.detach().add_(1)
            assert machine.now_ns > begin_ns, "any other tensor is the card's"


@pytest.mark.parametrize("installed", [True, False])
def test_a_large_state_is_told_of_8_bits(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("torchao", None)
    known = {"torchao": spec} if installed else {}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: known.get(name))
    evidence = with_adam()
    (advice,) = found(Kind.OPTIMIZER_STATE, evidence)
    large, last, bias = 256 * 256, 256 * 10, 256
    each_pair = [
        *[2 * (4 * large - (large + 4 * large // 256))] * 3,  # one byte for each element, and one scale for each 256
        *[0] * 3,  # the state of the biases is unchanged
    ]
    assert last < 4096, "too small for either library"
    assert bias < 4096
    assert advice.gain.saved_bytes == sum(each_pair)
    assert advice.gain.before_bytes == evidence.base.peak_bytes
    assert advice.action.startswith("torchao.optim.Adam8bit" if installed else "bitsandbytes.optim.Adam8bit")
    assert ("pip install" in advice.action) is not installed


def test_a_state_that_is_small_or_has_no_such_form_is_not_advised() -> None:
    model = perceptron()
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert found(Kind.OPTIMIZER_STATE, evidence_of(training_of(model, optimizer=momentum))) == []
    many = [(torch.randn(1 << 16, 256), torch.randint(10, (1 << 16,)))]
    adam = torch.optim.Adam(model.parameters())
    assert found(Kind.OPTIMIZER_STATE, evidence_of(training_of(model, many, adam))) == []


def test_without_an_optimizer_it_is_said_that_there_is_none() -> None:
    training = WorkloadTraining(lambda batch: (perceptron(), torch.randn(batch, 256)), 4, name="perceptron")
    with pytest.raises(NotSeen, match="no optimizer was given"):
        found(Kind.OPTIMIZER_FORM, Evidence(training, H100))
