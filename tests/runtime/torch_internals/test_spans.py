"""A profiler's trace has a span for every phase of the runtime; without a profiler nothing is recorded."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import vdnn
from tests.runtime.rigs.networks import perceptron
from vdnn.runtime.torch_internals import spans


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.10
def test_a_trace_shows_what_the_runtime_did() -> None:
    model, x = perceptron(32, 4), torch.randn(8, 32)
    session = vdnn.offload(device="sim", min_bytes=0, limits=vdnn.Limits(offload_window=1, reload_window=1))
    with session, profile(activities=[ProfilerActivity.CPU]) as trace:
        model(x).sum().backward()
    counts = {event.key: event.count for event in trace.key_averages() if event.key.startswith("vdnn::")}
    assert counts["vdnn::offload"] == session.counters.storages
    assert counts["vdnn::reload"] == session.counters.reloads
    assert counts["vdnn::wait for reload"] > 0
    session.close()


def test_without_a_profiler_a_span_is_nothing() -> None:
    assert spans.span("reload") is spans.span("offload")
