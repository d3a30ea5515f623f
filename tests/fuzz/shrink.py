"""Shrinks a program that differs: drops statements and opens blocks as long as a difference remains."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.fuzz.outcomes import Kind, Verdict
from tests.fuzz.program import ALWAYS, Program, Statement, flattened, unwrapped, without

Judge = Callable[[Program], Verdict]


def shrunk(program: Program, verdict_of: Judge) -> tuple[Program, Verdict]:
    """The smallest program found, and its verdict."""
    found = verdict_of(program)
    while found.kind is Kind.DIFFERENT:
        for smaller in _smaller(program):
            verdict = _verdict_or_none(smaller, verdict_of)
            if verdict is not None and verdict.kind is Kind.DIFFERENT and verdict.sort == found.sort:
                program, found = smaller, verdict
                break
        else:
            break
    return program, found


def _verdict_or_none(program: Program, verdict_of: Judge) -> Verdict | None:
    try:
        return verdict_of(program)
    except Exception:  # the program is not valid any more
        return None


def _smaller(program: Program) -> Iterator[Program]:
    count = sum(1 for _ in flattened(program.body))
    for index in reversed(range(count)):
        yield program._replace(body=without(program.body, index))
    for index in range(count):
        body = unwrapped(program.body, index)
        if sum(1 for _ in flattened(body)) == count - 1 and body != without(program.body, index):
            yield program._replace(body=body)
    for index in range(count):
        body = _always(program.body, [index])
        if body != program.body:
            yield program._replace(body=body)


def _always(body: tuple[Statement, ...], left: list[int]) -> tuple[Statement, ...]:
    kept = []
    for one in body:
        left[0] -= 1
        if left[0] == -1:
            one = one._replace(when=ALWAYS)
        kept.append(one._replace(body=_always(one.body, left)))
    return tuple(kept)
