"""Which algorithm each convolution of a step takes: fast ones want a workspace, and a workspace is memory.

A recording does not know workspaces. Whoever does says for each point which algorithms the convolution may take that
runs in the interval before it: how many bytes more than was recorded, and how many times the recorded time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vdnn.step.recording import Recording


class ConvolutionAlgorithm(NamedTuple):
    name: str
    workspace_bytes: int
    time_factor: float


Algorithms = Mapping[int, Sequence[ConvolutionAlgorithm]]  # by point
Choice = dict[int, ConvolutionAlgorithm]


def memory_optimal(algorithms: Algorithms) -> Choice:
    """The paper's (m)."""
    return {
        point: min(known, key=lambda one: (one.workspace_bytes, one.time_factor)) for point, known in algorithms.items()
    }


def performance_optimal(algorithms: Algorithms) -> Choice:
    """The paper's (p)."""
    return {point: _fastest_first(known)[0] for point, known in algorithms.items()}


def fastest_that_fit(algorithms: Algorithms, peaks: Sequence[int], budget_bytes: int) -> Choice:
    """From the fastest down, for each convolution alone; if none fits the one with the least workspace. `peaks` are
    those of every interval without workspaces."""
    choice = memory_optimal(algorithms)
    for point, known in algorithms.items():
        for algorithm in _fastest_first(known):
            if peaks[point] + algorithm.workspace_bytes <= budget_bytes:
                choice[point] = algorithm
                break
    return choice


def with_algorithms(recording: Recording, choice: Choice) -> Recording:
    """The step as it would be with these."""
    points = list(recording.points)
    for place, algorithm in choice.items():
        point = points[place]
        points[place] = dataclasses.replace(
            point,
            compute_ns=round(point.compute_ns * algorithm.time_factor),
            peak_bytes=point.peak_bytes + algorithm.workspace_bytes,
        )
    return dataclasses.replace(recording, points=tuple(points))


def _fastest_first(known: Sequence[ConvolutionAlgorithm]) -> list[ConvolutionAlgorithm]:
    return sorted(known, key=lambda one: (one.time_factor, one.workspace_bytes))
