"""Advice on loaders, from the measured time of a batch and of a step; advice on cudnn.benchmark, from the shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.advisor.programs import (
    BATCH,
    WIDTH,
    convolutional,
    evidence_of,
    found,
    perceptron,
    pictures,
    training_of,
    vectors,
)
from vdnn.advisor.advice import Basis, Kind
from vdnn.advisor.evidence import Evidence, NotSeen
from vdnn.advisor.host_reads import HostReads
from vdnn.advisor.loader import loader_workers
from vdnn.advisor.observation import observe
from vdnn.hardware import load_profile
from vdnn.hardware.operation_classes import LAYOUT_CONVERSION


def timed(loader_ns: int, step_ns: int | None = None, *, workers: int = 0) -> Evidence:
    """Evidence of a loader with the given measured times for each batch."""
    loader = DataLoader(vectors(), batch_size=BATCH, num_workers=workers)
    training = training_of(perceptron(), DataLoader(vectors(), batch_size=BATCH))
    evidence = evidence_of(training)
    training.loader = loader
    assert evidence.observed is not None
    evidence.observed = replace(evidence.observed, loader_ns=loader_ns, step_ns=step_ns)
    return evidence


def test_a_loader_without_workers_holds_the_card_up_for_all_it_takes() -> None:
    step_ns = timed(1).base.step_ns
    (advice,) = loader_workers(timed(3 * step_ns), cores=8)
    assert advice.gain.before_ns == step_ns + 3 * step_ns
    assert advice.gain.after_ns == step_ns, "three workers bring a batch in the time of a step"
    assert "num_workers=3," in advice.action
    assert "75% of the time" in advice.seen


def test_workers_that_are_too_few_are_told_how_many_it_takes() -> None:
    (advice,) = loader_workers(timed(2_000_000, 1_000_000, workers=2), cores=8)
    assert "num_workers=4," in advice.action
    assert (advice.gain.before_ns, advice.gain.after_ns) == (1_000_000 + 1_000_000, 1_000_000)


def test_cores_that_are_not_there_are_not_advised() -> None:
    (advice,) = loader_workers(timed(8_000_000, 1_000_000), cores=2)
    assert "num_workers=2," in advice.action
    assert advice.gain.after_ns == 1_000_000 + (4_000_000 - 1_000_000), "a wait is left"
    assert loader_workers(timed(2_000_000, 1_000_000, workers=2), cores=2) == []


def test_a_loader_that_keeps_up_is_not_advised() -> None:
    assert loader_workers(timed(900_000, 1_000_000, workers=1), cores=8) == []
    assert loader_workers(timed(10_000, 1_000_000), cores=8) == [], "a hundredth is no wait"


def test_a_list_of_batches_has_no_workers() -> None:
    batches = [(torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,)))] * 4
    with pytest.raises(NotSeen, match="not a DataLoader but a list"):
        found(Kind.LOADER_WORKERS, evidence_of(training_of(perceptron(), batches)))


def test_too_few_batches_to_time_are_said() -> None:
    training = training_of(perceptron(), DataLoader(vectors(BATCH), batch_size=BATCH))
    with pytest.raises(NotSeen, match="too few batches"):
        found(Kind.LOADER_WORKERS, evidence_of(training))


def test_pageable_batches_are_told_of_pinning_with_the_links_time() -> None:
    evidence = timed(1, 100_000)
    (advice,) = found(Kind.PINNED_MEMORY, evidence)
    nbytes = BATCH * WIDTH * 4 + BATCH * 8
    profile = evidence.profile
    copy_ns = round(nbytes / profile.to_device_bytes_per_s * 1e9) + profile.link_latency_ns
    assert advice.gain.saved_ns == copy_ns
    assert advice.gain.after_ns == 100_000


def test_pinned_or_small_batches_are_not_advised() -> None:
    assert found(Kind.PINNED_MEMORY, timed(1, 1_000_000_000)) == [], "a copy that is nothing beside the step"
    evidence = timed(1, 100_000)
    evidence.loop.loader = DataLoader(vectors(), batch_size=BATCH, pin_memory=True)
    assert found(Kind.PINNED_MEMORY, evidence) == []


class TickingLoader:
    """Each batch takes 7 units of the clock, and the first takes 100."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(6):
            self.now_ns += 7 if number else 100
            yield torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,))


def test_a_batch_is_timed_without_the_first_and_without_steps() -> None:
    loader = TickingLoader()
    observed = observe(training_of(perceptron(), loader), 2, HostReads(), clock=lambda: loader.now_ns)
    assert observed.loader_ns == 7
    assert observed.step_ns is None, "a step's time is measured on a GPU only"
    assert observed.steps == 2


def with_pictures(sizes: list[int], *, steps: int = 2) -> Evidence:
    batches = [(torch.randn(size, 3, 8, 8), torch.randint(10, (size,))) for size in sizes]
    return evidence_of(training_of(convolutional(bias=False), batches), steps=steps)


def test_convolutions_of_one_shape_are_told_of_cudnns_trials() -> None:
    (advice,) = found(Kind.CUDNN_BENCHMARK, with_pictures([8, 8, 8]))
    assert advice.action == "torch.backends.cudnn.benchmark = True"
    assert "same shape in all 2 steps" in advice.seen


def test_shapes_that_vary_products_alone_and_settings_that_are_on_are_not_advised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert found(Kind.CUDNN_BENCHMARK, with_pictures([8, 6, 8])) == []
    assert found(Kind.CUDNN_BENCHMARK, evidence_of(training_of(perceptron()), steps=2)) == []
    evidence = with_pictures([8, 8])
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert found(Kind.CUDNN_BENCHMARK, evidence) == []


def test_one_step_does_not_tell_whether_shapes_vary() -> None:
    with pytest.raises(NotSeen, match="one step"):
        found(Kind.CUDNN_BENCHMARK, with_pictures([8, 8], steps=1))


def test_convolutions_that_lie_channels_first_are_told_so() -> None:
    loader = DataLoader(
        TensorDataset(torch.randn(1, 64, 56, 56).expand(64, -1, -1, -1), torch.randint(10, (64,))), batch_size=64
    )
    model = nn.Sequential(
        nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    training = training_of(model, loader)
    (advice,) = found(Kind.CHANNELS_LAST, evidence_of(training))
    assert advice.seen.startswith("2 of 2 weights")
    assert advice.gain.basis is Basis.PREDICTED
    assert advice.gain.before_ns is not None
    assert advice.gain.after_ns is not None
    assert advice.gain.after_ns < advice.gain.before_ns
    h100 = load_profile("h100")
    others = {name: value for name, value in h100.efficiency.items() if name != LAYOUT_CONVERSION}
    (advice,) = found(Kind.CHANNELS_LAST, evidence_of(training, replace(h100, efficiency=others)))
    assert "layouts" in str(advice.gain), "no gain is made up"
    last = training_of(model.to(memory_format=torch.channels_last), loader)
    assert found(Kind.CHANNELS_LAST, evidence_of(last)) == []


@pytest.mark.parametrize(("card", "advised"), [("v100-16", 1), ("p100", 0), ("titan-x", 0)])
def test_layouts_matter_on_tensor_cores_only(card: str, advised: int) -> None:
    loader = DataLoader(pictures(), batch_size=BATCH)
    assert len(found(Kind.CHANNELS_LAST, evidence_of(training_of(convolutional(bias=False), loader), card))) == advised


def test_without_convolutions_no_layout_is_advised() -> None:
    assert found(Kind.CHANNELS_LAST, evidence_of(training_of(perceptron()))) == []
    one = nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 254, 10))
    assert found(Kind.CHANNELS_LAST, evidence_of(training_of(one))) == [], "in one dimension there is one layout"
