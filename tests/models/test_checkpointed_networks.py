"""ResNet-18 and BERT with a head for masked tokens: published parameter counts, and steps that run."""

from __future__ import annotations

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.models import bert_base
from benchmarks.models.masked_bert import masked_bert_base
from benchmarks.models.resnet18 import resnet18
from benchmarks.models.workload import Workload


def test_its_parameters_are_torchvisions() -> None:
    with FakeTensorMode():
        assert resnet18(1).parameter_count == 11_689_512


def test_the_head_for_masked_tokens_has_the_parameters_of_that_for_all() -> None:
    with FakeTensorMode():
        assert masked_bert_base(1, 14).parameter_count == bert_base(1, 14).parameter_count


@pytest.mark.parametrize("name", ["resnet18", "masked_bert_base"])
def test_a_step_gives_every_parameter_a_gradient(name: str) -> None:
    with FakeTensorMode():
        workload: Workload = resnet18(2) if name == "resnet18" else masked_bert_base(2, 14)
        shape = workload.model(*workload.inputs).shape
        assert shape == ((2, 1000) if name == "resnet18" else (4, 30522)), "two images, or every seventh of 28 tokens"
        workload.step()
        assert all(one.grad is not None and one.grad.shape == one.shape for one in workload.model.parameters())
