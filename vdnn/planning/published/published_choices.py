"""What published rules would rebuild under a budget: where a search for something better may begin.

DTR's evictions and Capuchin's choice by memory saved per second are quick on any step. Chen's segments and MegEngine's
cuts look at many steps: they are asked only where these are so short that it takes no time.
"""

from __future__ import annotations

from collections.abc import Iterator

from vdnn.planning.policies.plan_policy import PlanPolicy, PlanRequest
from vdnn.planning.published.capuchin_full import to_recompute
from vdnn.planning.published.chen_sqrt import ChenSqrt
from vdnn.planning.published.dtr import Dtr
from vdnn.planning.published.megengine_sublinear import MegengineSublinear
from vdnn.step.plan import Action

# Points of a step of which many are looked at.
_SHORT = 400


def published_choices(request: PlanRequest) -> Iterator[frozenset[int]]:
    """The budget is one that some plan meets, and not everything kept does."""
    assert request.budget_bytes is not None, "without a budget nothing has to go"
    policies: list[PlanPolicy] = [Dtr()]
    if len(request.recording.points) <= _SHORT:
        policies += [ChenSqrt(), MegengineSublinear()]
    for policy in policies:
        lifetimes = policy.plan(request).lifetimes
        yield frozenset(index for index, one in enumerate(lifetimes) if one.action is Action.RECOMPUTE)
    yield frozenset(to_recompute(request, request.budget_bytes))
