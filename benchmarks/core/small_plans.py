"""Plans of models of full size, for models of the same structure that take next to no time.

A plan is made from a step without data of the model of full size, on a virtual machine. The small model saves and uses
in the same order, so it can follow that plan with real numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

import vdnn
from benchmarks.models import bert, convnext, gpt, llama, resnet, vit
from benchmarks.models.workload import CrossEntropy, Workload
from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.step.plan import Plan, PlannedPoint
from vdnn.step.recording import Recording

_MACHINE = "h100"
_VOCABULARY, _TOKENS, _BATCH = 64, 16, 2


@dataclass(frozen=True, slots=True)
class Model:
    """A model of full size, one of the same structure, and the class of its blocks, which checkpointing repeats.
    `has_lengths`: the small one takes sequences of other lengths."""

    whole: Callable[[], Workload]
    small: Callable[[], Workload]
    block: type[nn.Module]
    has_lengths: bool = False


def models() -> dict[str, Model]:
    gpt_shape = replace(gpt.SMALL, vocabulary=_VOCABULARY, tokens=2 * _TOKENS, width=48)
    llama_shape = replace(llama.OF_1B, vocabulary=_VOCABULARY, width=64, inner=64, heads=8, shared_heads=2)
    vit_shape = replace(vit.BASE, width=48, side=2 * vit.PATCH)
    return {
        "GPT-2": Model(lambda: gpt.gpt2(4), lambda: gpt.gpt(_BATCH, _TOKENS, gpt_shape), gpt.Block, has_lengths=True),
        "ResNet-50": Model(
            lambda: resnet.resnet50(64), lambda: resnet.resnet(_BATCH, (3, 4, 6, 3), 32, 4), resnet.Bottleneck
        ),
        "Llama 1B": Model(lambda: llama.llama_1b(1), lambda: llama.llama(1, _TOKENS, llama_shape), llama.Layer),
        "BERT": Model(
            lambda: bert.bert_base(8),
            lambda: bert.bert(_BATCH, _TOKENS, bert.BASE_LAYERS, 2 * bert.HEAD_WIDTH, _VOCABULARY),
            bert.Layer,
            has_lengths=True,
        ),
        "ViT": Model(lambda: vit.vit_base(32), lambda: vit.vit(_BATCH, vit_shape), vit.Layer),
        "ConvNeXt": Model(
            lambda: convnext.convnext_tiny(32), lambda: convnext.convnext(_BATCH, 8, side=64), convnext.Block
        ),
    }


def of_size(workload: Workload, batch: int, tokens: int) -> Workload:
    """The same model, on so many sequences of another length."""
    inputs = torch.randint(_VOCABULARY, (batch, tokens))
    return Workload(workload.model, (inputs,), CrossEntropy(_VOCABULARY, batch, tokens, last=True))


def recorded(make: Callable[[], Workload]) -> Recording:
    """The recording of a step without data, with the recipes that were found."""
    with vdnn.VirtualMachine(_MACHINE) as machine:
        workload = make()
        with vdnn.offload("keep", device=machine, measure=True, min_bytes=0) as session:
            for _ in range(2):
                workload.step()
                session.step()
        recording = session.recording
    if recording is None:
        raise RuntimeError("expected a recording after two steps, got none")
    return recording


def small_plan(whole: Recording, small: Recording, share: float) -> Plan:
    """The plan for a share of the peak of the model of full size, for the saves of the small one."""
    budget = max(least_bytes(whole), round(share * whole.peak_bytes))
    plan = plan_step(whole, profile_costs(load_profile(_MACHINE)), budget, "auto").plan
    if [(one.kind, one.lifetime) for one in whole.points] != [(one.kind, one.lifetime) for one in small.points]:
        raise RuntimeError("expected a small model with the saves and uses of the one of full size, got others")
    keys = {point.key: other.key for point, other in zip(whole.points, small.points, strict=True)}
    points = tuple(PlannedPoint(one.kind, one.lifetime, keys.get(one.key, one.key)) for one in plan.points)
    sizes = [one.nbytes for one in small.lifetimes]
    lifetimes = tuple(replace(one, nbytes=nbytes) for one, nbytes in zip(plan.lifetimes, sizes, strict=True))
    return replace(plan, points=points, lifetimes=lifetimes)
