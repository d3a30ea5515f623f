"""vdnn-conv with a recording: every storage that a convolution uses is offloaded, and nothing else."""

from __future__ import annotations

from tests.planning.policies.steps import CONVOLUTION, absences_of, made_plan, with_operations
from tests.planning.recordings import chain
from vdnn.step.plan import Absence


def test_only_what_a_convolution_uses_goes() -> None:
    recording = with_operations(chain([10] * 5), [CONVOLUTION, "MaxPool2DWithIndicesBackward0", CONVOLUTION, "", ""])
    # Reloads are issued across layers that need none, up to the next convolution.
    assert absences_of(made_plan("vdnn-conv", recording)) == {0: (Absence(1, 7),), 2: (Absence(3, 5),)}


def test_transposed_convolutions_and_others_by_that_node_count() -> None:
    recording = with_operations(chain([10] * 3), ["ConvolutionBackwardBackward0", "ConvolutionOverrideable", ""])
    assert set(absences_of(made_plan("vdnn-conv", recording))) == {0}


def test_without_convolutions_nothing_goes() -> None:
    assert absences_of(made_plan("vdnn-conv", chain([10] * 4))) == {}
