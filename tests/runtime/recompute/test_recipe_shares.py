"""The share of a model's saved bytes that remains with cheap recipes and bit masks, from the benchmark that
prints it.
"""

from __future__ import annotations

import pytest

from benchmarks.plans.recipe_shares import SUBJECTS, main, measure, share

# Percent of the saved bytes, with chains of 8 operations; and the same without autocast's casts of weights.
LIMITS = {
    "resnet50": (56, 56),
    "densenet121": (50, 50),
    "vgg16": (75, 75),
    "bert": (47, 54),
    "vit": (47, 67),
}


@pytest.mark.slow
@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("name", LIMITS)
def test_no_more_is_left_than_this(name: str) -> None:
    storages = measure(SUBJECTS[name], 8, cuda_shaped=True)
    most, most_without_casts = LIMITS[name]
    assert share(storages, with_weight_casts=True) < most
    assert share(storages, with_weight_casts=False) < most_without_casts


def test_the_table_names_what_stays_and_what_is_recomputed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--models", "vgg16", "--batch", "1", "--remaining"]) == 0
    printed = capsys.readouterr().out
    assert "VGG-16 (1)" in printed
    assert "kept: float32 by Relu" in printed
    assert "recomputed: max_pool indices" in printed
