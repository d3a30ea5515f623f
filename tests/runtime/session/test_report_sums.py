"""The figures of session.report() add up: in sessions that copy, that recompute, and that do both."""

from __future__ import annotations

import re

import pytest

import vdnn
from tests.runtime.rigs.networks import images, small_resnet
from tests.runtime.rigs.virtual_training import recompute_all, recording_of, trained_virtually
from vdnn.runtime.session.session import Session

KINDS = ("still on the device", "already reloaded", "reloaded on demand", "recomputed")


def online(policy: str) -> Session:
    """A session without a plan. Each graph is used twice, so that second uses count too."""
    limits = vdnn.Limits(offload_window=1, reload_window="4KiB")
    with vdnn.offload(policy, device="sim", min_bytes=0, limits=limits) as session:
        model = small_resnet()
        for _ in range(2):
            loss = model(images()).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            del loss
    return session


def planned(*, offload_rest: bool) -> Session:
    return trained_virtually("resnet", recompute_all(recording_of("resnet"), offload_rest=offload_rest))


SESSIONS = {
    "copies": (lambda: online("vdnn-all"), {"already reloaded", "reloaded on demand"}),
    "recomputes": (lambda: planned(offload_rest=False), {"recomputed"}),
    "both, by a policy": (lambda: online("recompute-all"), {"already reloaded", "reloaded on demand", "recomputed"}),
    "both, by a plan": (lambda: planned(offload_rest=True), {"reloaded on demand", "recomputed"}),
}


def counts(pattern: str, report: str) -> tuple[int, ...]:
    (found,) = re.findall(rf"^{pattern}", report, re.MULTILINE)
    return tuple(map(int, (found,) if isinstance(found, str) else found))


@pytest.mark.parametrize("name", SESSIONS)
def test_every_line_of_the_report_adds_up(name: str) -> None:
    train, away = SESSIONS[name]
    session = train()
    report, counters = session.report(), session.counters

    (saves,) = counts(r"policy \S+: (\d+) saves of", report)
    (offloaded,) = counts(r"  offloaded (\d+) storages", report)
    (discarded,) = counts(r"  discarded without a copy (\d+) storages", report)
    (shared,) = counts(r"  (\d+) saves share", report)
    kept = [int(one) for one in re.findall(r"^  kept (\d+) saves", report, re.MULTILINE)]
    assert saves == offloaded + discarded + shared + sum(kept)

    uses, *of_a_kind = counts(r"  (\d+) uses: " + ", ".join(rf"(\d+) {kind}" for kind in KINDS), report)
    assert uses == sum(of_a_kind)
    used = dict(zip(KINDS, of_a_kind, strict=True))
    assert {kind for kind, count in used.items() if count} - {"still on the device"} == away

    reloads, ahead, on_demand = counts(r"  (\d+) reloads of [^:]*: (\d+) ahead of a use, (\d+) on demand", report)
    assert reloads == ahead + on_demand
    assert on_demand == used["reloaded on demand"]
    assert counters.freed_bytes + counters.copied_not_freed_bytes == counters.storage_bytes
    session.close()
