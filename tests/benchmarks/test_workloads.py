"""Workloads by name: both sizes, blocks for checkpointing, missing packages, and the loader's batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.harness import workload_sources
from benchmarks.harness.synthetic_data import DataOptions, Feed, SyntheticSamples, forms_of
from benchmarks.harness.workload_sources import Source
from benchmarks.harness.workloads import WORKLOADS, workload_named, workload_names
from benchmarks.models.workload import Workload
from benchmarks.peers.checkpoint import outermost

pytestmark = pytest.mark.slow

PAPER = {"alexnet", "overfeat", "googlenet", "vgg16", "vgg116", "vgg216", "vgg316", "vgg416"}
# An LSTM has no repeated part that could be recomputed as a block.
WITHOUT_BLOCKS = {"lstm"}


def test_the_networks_of_the_paper_and_those_since_are_there() -> None:
    assert set(WORKLOADS) >= PAPER | {"resnet1202", "unet3d", "mobilenet_v2", "lstm", "mixtral", "gpt2_xl", "vit_base"}
    assert {name for name in WORKLOADS if name.startswith("llama_1b_")} == {
        f"llama_1b_{kilo}k" for kilo in (4, 8, 16, 32, 64)
    }


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_blocks_at_both_sizes_or_is_a_chain(name: str) -> None:
    entry = WORKLOADS[name]
    with FakeTensorMode():
        made = [entry.make_at(1, is_tiny=False)[0].model]
        if entry.tiny is not None:
            made.append(entry.make_at(None, is_tiny=True)[0].model)
    for model in made:
        if entry.blocks:
            assert outermost(model, entry.blocks)
        else:
            assert isinstance(model, nn.Sequential) or name in WITHOUT_BLOCKS


def test_a_tiny_one_has_fewer_parameters_than_a_full_one() -> None:
    with FakeTensorMode():
        for name in ("vgg16", "bert_base", "llama_8b_4k", "mixtral"):
            full, tiny = (WORKLOADS[name].make_at(None, is_tiny=is_tiny)[0] for is_tiny in (False, True))
            assert 20 * tiny.parameter_count < full.parameter_count


def test_a_workload_without_a_tiny_size_says_where_it_can_run() -> None:
    with pytest.raises(ValueError, match="'inception_v3' has no tiny size: run it on 'virtual' or 'cuda'"):
        WORKLOADS["inception_v3"].make_at(None, is_tiny=True)


def test_an_unknown_workload_is_told_what_there_is() -> None:
    with pytest.raises(ValueError, match="expected a workload among alexnet, .*vgg16.*, got 'vgg17'"):
        workload_named("vgg17")


def test_a_package_that_does_not_import_says_so_and_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Source("no_such_package", ("timm:resnet50",), lambda name: pytest.fail("was asked for a model"))
    monkeypatch.setitem(workload_sources.SOURCES, "timm", missing)
    with pytest.raises(ValueError, match="timm:resnet50: no_such_package cannot be imported .ModuleNotFoundError"):
        workload_named("timm:resnet50")
    assert "timm:resnet50" not in workload_names()


def test_a_model_of_transformers_is_made_from_its_configuration_and_steps() -> None:
    pytest.importorskip("transformers")
    assert "transformers:gpt2" in workload_names()
    with pytest.raises(ValueError, match="among gpt2, bert-base, llama-1b, vit-base, got 'gpt9'"):
        workload_named("transformers:gpt9")
    entry = workload_named("transformers:gpt2")
    with FakeTensorMode():
        assert entry.make_at(1, is_tiny=False)[0].parameter_count == 124_439_808
    torch.manual_seed(0)
    tiny, _ = entry.make_at(2, is_tiny=True)
    tiny.step()
    assert all(parameter.grad is not None for parameter in tiny.model.parameters())
    assert len(outermost(tiny.model, entry.blocks)) == 2


# Data.


class Noted:
    """Has a workload and runs nothing."""

    workload = Workload(nn.Identity(), (torch.zeros(3, 5), torch.tensor([[1, 7], [0, 2], [3, 3]])), lambda x: x)


def test_a_sample_is_of_the_inputs_form_and_the_same_whenever_it_is_asked_for() -> None:
    samples = SyntheticSamples(forms_of(Noted.workload))
    image, words = samples[4]
    assert image.shape == (5,)
    assert (words.shape, words.dtype) == ((2,), torch.int64)
    assert int(words.max()) < 8, "no larger than the largest that the inputs show"
    assert all(torch.equal(one, again) for one, again in zip(samples[4], samples[4], strict=True))
    assert not torch.equal(samples[4][0], samples[5][0])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_brings_every_step_the_next_batch(workers: int) -> None:
    workload = Workload(nn.Identity(), (torch.zeros(3, 5),), lambda x: x)
    samples = SyntheticSamples(forms_of(workload))
    feed = Feed(workload, DataOptions(workers=workers))
    for step in range(2):
        feed.next()
        expected = torch.stack([samples[3 * step + place][0] for place in range(3)])
        assert torch.equal(workload.inputs[0], expected)
    feed.close()


def test_without_a_loader_the_inputs_stay() -> None:
    workload = Workload(nn.Identity(), (torch.ones(3, 5),), lambda x: x)
    feed = Feed(workload, DataOptions())
    feed.next()
    assert torch.equal(workload.inputs[0], torch.ones(3, 5))
