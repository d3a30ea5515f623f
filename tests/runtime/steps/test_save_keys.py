"""The keys and forms of saves, which the steps of a session make once."""

from __future__ import annotations

import gc
import random

import torch

import vdnn
from benchmarks.core.host_ways import counted_gauges
from tests.runtime.rigs.networks import conv_chain, images
from vdnn import _C
from vdnn.runtime.steps import save_keys
from vdnn.runtime.steps.save_keys import SaveKeys
from vdnn.runtime.torch_internals.module_watch import MarkedModules, ModuleWatch
from vdnn.step.forms import Forms
from vdnn.step.recording import SaveKey

_NAMES = ("", "ReluBackward0", "AddmmBackward0")


def saves_of_a_step(draw: random.Random) -> list[torch.Tensor]:
    return [
        draw.choice((torch.relu, torch.tanh, torch.Tensor.detach))(
            torch.ones(draw.randint(1, 3), 2, requires_grad=True)
        )
        for _ in range(30)
    ]


def keys_of(saves: list[torch.Tensor], before: SaveKeys | None) -> tuple[SaveKeys, list[SaveKey]]:
    keys, modules = SaveKeys(before=before), ModuleWatch(MarkedModules())
    return keys, [keys.key(one, one.grad_fn, modules) for one in saves]


def test_keys_number_equal_saves_and_forms_number_those_of_any_size() -> None:
    before: SaveKeys | None = None
    for seed in range(20):
        saves = saves_of_a_step(random.Random(seed))
        keys, made = keys_of(saves, before)
        forms = Forms()
        expected = [forms.of(key) for key in made]
        assert list(keys.saves) == expected
        for at, (one, key) in enumerate(zip(saves, made, strict=True)):
            alike = [other for other in made[:at] if other.producer == key.producer and other.size == key.size]
            producer = "" if one.grad_fn is None else one.grad_fn.name()
            assert key == SaveKey(producer, "", "float32", tuple(one.shape), one.stride(), len(alike))
        before = keys


def test_steps_that_save_the_same_share_their_keys_and_forms() -> None:
    saves = saves_of_a_step(random.Random(1))
    first, made = keys_of(saves, None)
    second, again = keys_of(saves, first)
    assert all(one is other for one, other in zip(made, again, strict=True))
    assert all(one is other for one, other in zip(first.saves, second.saves, strict=True))
    assert second.kind == first.kind


def test_a_session_of_ever_new_sizes_remembers_a_bounded_number_of_keys() -> None:
    modules, before = ModuleWatch(MarkedModules()), SaveKeys()
    most = 0
    for size in range(1, 3 * save_keys._MOST_KNOWN, 16):
        keys = SaveKeys(before=before)
        made = [keys.key(torch.empty(one), None, modules) for one in (*range(size, size + 16), size)]
        assert [key.occurrence for key in made] == [0] * 16 + [1]
        most, before = max(most, len(keys._known._keys)), keys
    assert most <= save_keys._MOST_KNOWN + 16


def test_a_recorded_save_leaves_few_objects_to_the_garbage_collector() -> None:
    """Its collections take as long as there are objects. With an object for each point there were 29 for each save."""
    model, x = conv_chain(), images()
    with (
        counted_gauges(),
        vdnn.offload("keep", device=_C.SimDevice(), recompute=False, measure=True, min_bytes=0) as session,
    ):
        model(x).square().sum().backward()
        session.step()
        gc.collect()
        gc.disable()
        try:
            before = len(gc.get_objects())
            loss = model(x).square().sum()
            made = len(gc.get_objects()) - before
        finally:
            gc.enable()
        loss.backward()
        session.step()
        assert session.recording is not None
        points = len(session.recording.points) // 2
    assert points > 8
    assert made <= 20 * points
