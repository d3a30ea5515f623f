"""Chooses an algorithm for each convolution of a step: fast algorithms need a workspace, and a workspace is memory.

A recording does not contain workspaces. The caller gives, for each point, the algorithms that the convolution in the
interval before it may use: the bytes they need beyond the recorded ones, and their time as a multiple of the recorded
time.
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
    """The algorithms with the least workspace, the vDNN paper's (m)."""
    return {
        point: min(known, key=lambda one: (one.workspace_bytes, one.time_factor)) for point, known in algorithms.items()
    }


def performance_optimal(algorithms: Algorithms) -> Choice:
    """The fastest algorithms, the vDNN paper's (p)."""
    return {point: _fastest_first(known)[0] for point, known in algorithms.items()}


def fastest_that_fit(algorithms: Algorithms, peaks: Sequence[int], budget_bytes: int) -> Choice:
    """The fastest algorithm of each convolution that fits, or the one with the least workspace if none fits. `peaks`
    are those of every interval without workspaces."""
    choice = memory_optimal(algorithms)
    for point, known in algorithms.items():
        for algorithm in _fastest_first(known):
            if peaks[point] + algorithm.workspace_bytes <= budget_bytes:
                choice[point] = algorithm
                break
    return choice


def with_algorithms(recording: Recording, choice: Choice) -> Recording:
    """The step with the time and the workspaces of these algorithms."""
    points = list(recording.points)
    for index, algorithm in choice.items():
        point = points[index]
        points[index] = dataclasses.replace(
            point,
            compute_ns=round(point.compute_ns * algorithm.time_factor),
            peak_bytes=point.peak_bytes + algorithm.workspace_bytes,
        )
    return dataclasses.replace(recording, points=tuple(points))


def _fastest_first(known: Sequence[ConvolutionAlgorithm]) -> list[ConvolutionAlgorithm]:
    return sorted(known, key=lambda one: (one.time_factor, one.workspace_bytes))
