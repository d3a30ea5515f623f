"""Predicts which parameters are used next, from the order in which they were used before.

A prediction is the use that followed these two uses last time, in the same phase: a call of a model, or a backward. It
never goes beyond the phase, so nothing is fetched ahead while the program may write to parameters.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator


class UseOrder:
    """Numbers stand for parameters. Memory is bounded by the distinct pairs of uses."""

    def __init__(self) -> None:
        self._after: dict[tuple[Hashable, int | None, int], int] = {}
        self._phase: Hashable = None
        self._before: int | None = None
        self._last: int | None = None

    def begin(self, phase: Hashable) -> None:
        self._phase, self._before, self._last = phase, None, None

    def used(self, phase: Hashable, number: int) -> None:
        if phase != self._phase:
            self.begin(phase)
        if number == self._last:
            return
        if self._last is not None:
            self._after[self._phase, self._before, self._last] = number
        self._before, self._last = self._last, number

    def predicted(self) -> Iterator[int]:
        """The uses after the last one, the next one first."""
        before, last, phase = self._before, self._last, self._phase
        while last is not None:
            following = self._after.get((phase, before, last))
            if following is None:
                return
            yield following
            before, last = last, following
