"""The comparison of a rehearsal's saves with CUDA's: it hears a difference, and a CUDA build of torch finds none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.cuda_saves.__main__ import main
from benchmarks.cuda_saves.difference import byte_error, differences
from benchmarks.cuda_saves.saves import Save, cuda_saves, rehearsed_saves
from benchmarks.cuda_saves.zoo import zoo
from vdnn.runtime.rehearsal import cuda_shaped

needs_cuda_build = pytest.mark.skipif(torch.version.cuda is None, reason="torch is not a CUDA build")


def test_a_difference_is_named_with_both_sides() -> None:
    first, wide, narrow = Save(4096, "float32", (32, 32)), Save(800, "float32", (200,)), Save(400, "bfloat16", (200,))
    seed = Save(8, "int64", ())
    assert differences([first, wide], [first, seed, wide]) == []
    (found,) = differences([first, wide], [first, narrow])
    assert str(found) == ("the rehearsal has 800 bytes as float32 [200], CUDA has 400 bytes as bfloat16 [200]")
    assert byte_error([first, wide], [first, narrow]) == 400 / 4496


def test_a_rehearsal_has_a_list_of_saves() -> None:
    saves = rehearsed_saves(zoo()["resnet18"], 2)
    assert len(saves) > 50
    assert len(zoo()) > 30


def test_without_a_cuda_build_there_is_nothing_to_compare_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert main([]) == 2
    assert "is not a CUDA build" in capsys.readouterr().err


@needs_cuda_build
@pytest.mark.parametrize("name", ["resnet18", "bert_base", "llama_1b"])
def test_a_model_saves_what_cuda_saves(name: str) -> None:
    assert differences(rehearsed_saves(zoo()[name], 2), cuda_saves(zoo()[name], 2)) == []


@needs_cuda_build
def test_a_wrong_translation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def untranslated(func: Any, *args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def build(batch: int) -> Any:
        return nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)), torch.randn(batch, 64)

    assert differences(rehearsed_saves(build, 2), cuda_saves(build, 2)) == []
    monkeypatch.setattr(cuda_shaped, "_TABLE", dict.fromkeys(cuda_shaped._TABLE, untranslated))
    assert differences(rehearsed_saves(build, 2), cuda_saves(build, 2))
