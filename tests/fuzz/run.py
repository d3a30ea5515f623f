"""Runs many programs in several processes: python -m tests.fuzz.run --programs 100000 --first-seed 0 --workers 2

`--seed S` shows one program and its verdict; `--shrink S` shows the smallest part of it that still differs.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fuzz.outcomes import Verdict
    from tests.fuzz.program import Program

GRAMMARS = ("steps", "training", "compiled")
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Drawn:
    """The grammar that programs are drawn from, and a mode instead of the ones that their seeds draw."""

    grammar: str = "steps"
    mode: str | None = None

    def program_of(self, seed: int) -> Program:
        if self.grammar == "training":
            from tests.fuzz.trainings import plot as trainings

            return trainings.program_of(seed, self.mode)
        if self.grammar == "compiled":
            from tests.fuzz import compiled_regions

            return compiled_regions.program_of(seed, self.mode)
        from tests.fuzz import plot

        return plot.program_of(seed, self.mode)

    def verdict_of(self, program: Program, recheck: int = 1) -> Verdict:
        """`recheck`: one step in this many is checked."""
        if self.grammar == "training":
            from tests.fuzz.trainings import verdicts

            return verdicts.verdict_of(program, recheck)
        if self.grammar == "compiled":
            from tests.fuzz import compiled_regions

            return compiled_regions.verdict_of(program)
        from tests.fuzz import outcomes

        return outcomes.verdict_of(program, recheck)

    def plain_errors(self, program: Program) -> list[BaseException | None]:
        if self.grammar == "training":
            from tests.fuzz.trainings import verdicts

            return [one.error for one in verdicts.plain_outcomes(program)]
        if self.grammar == "compiled":
            return []
        from tests.fuzz import outcomes

        return [one.error for one in outcomes.plain_outcomes(program)]


def main(arguments: list[str] | None = None) -> int:
    asked = _parsed(arguments)
    drawn = Drawn(asked.grammar, asked.mode)
    if asked.seed is not None:
        return _show(asked.seed, drawn)
    if asked.shrink is not None:
        return _shrink(asked.shrink, drawn)
    summary = run_many(asked.first_seed, asked.programs, asked.workers, drawn, asked.seconds)
    return 1 if summary.differences else 0


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="end after this time, with the programs that ran until then",
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--grammar",
        choices=GRAMMARS,
        default="steps",
        help="of single steps, of whole trainings, or of compiled regions",
    )
    parser.add_argument("--mode", help="instead of the one that the seed draws")
    parser.add_argument("--seed", type=int, help="show this program and how it comes out")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="make this program smaller")
    return parser.parse_args(arguments)


def prepare() -> None:
    """Prepares a process that runs programs."""
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    warnings.simplefilter("ignore")


def _show(seed: int, drawn: Drawn) -> int:
    prepare()
    from tests.fuzz.outcomes import Kind, warnings_of_vdnn

    program = drawn.program_of(seed)
    print(program.listing())
    for step, error in enumerate(drawn.plain_errors(program)):
        print(f"  plain, step {step}: {'' if error is None else repr(error)[:150]}")
    with warnings_of_vdnn() as said:
        verdict = drawn.verdict_of(program)
    print(*said, verdict, sep="\n")
    return verdict.kind is Kind.DIFFERENT


def _shrink(seed: int, drawn: Drawn) -> int:
    prepare()
    from tests.fuzz.outcomes import warnings_of_vdnn
    from tests.fuzz.shrink import shrunk

    with warnings_of_vdnn():
        program, verdict = shrunk(drawn.program_of(seed), drawn.verdict_of)
    print(program.listing(), verdict, sep="\n")
    return 0


@dataclass
class Summary:
    """Counts over all programs of a run."""

    first_seed: int
    programs: int
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    by_mode: Counter[str] = field(default_factory=Counter)
    by_production: Counter[str] = field(default_factory=Counter)
    refused: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    differences: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, one: Result) -> None:
        self.done += 1
        self.by_mode[one.mode] += 1
        self.by_production.update(one.names)
        if one.kind == "refused":
            self.refused.append(one.seed)
        elif one.kind == "lost":
            self.lost.append(one.seed)
        elif one.kind != "same":
            self.differences.append((one.seed, one.mode, one.said))
            print(f"seed {one.seed}, {one.mode}: {one.said}", flush=True)

    def line(self) -> str:
        rate = self.done / max(time.monotonic() - self.began, 1e-3)
        return (
            f"{self.done} of {self.programs} programs, {len(self.differences)} differences, "
            f"{len(self.refused)} refused, {len(self.lost)} lost, {rate:.1f} a second"
        )

    def __str__(self) -> str:
        return "\n".join(
            [
                self.line(),
                "modes: " + ", ".join(f"{name} {count}" for name, count in sorted(self.by_mode.items())),
                "productions: " + ", ".join(f"{name} {count}" for name, count in self.by_production.most_common()),
                f"refused: {', '.join(map(str, self.refused[:40])) or 'none'}",
                f"lost, as by any hooks that copy, or torch's own: {', '.join(map(str, self.lost[:40])) or 'none'}",
                *(f"different: seed {seed}, {mode}: {said}" for seed, mode, said in self.differences),
            ]
        )


@dataclass(frozen=True)
class Result:
    """The result of one program."""

    seed: int
    mode: str
    kind: str
    said: str
    names: tuple[str, ...] = ()


def result_of(seed: int, drawn: Drawn) -> Result:
    program = drawn.program_of(seed)
    try:
        verdict = drawn.verdict_of(program)
    except Exception as error:  # an error of the rig, or of the session at its exit
        return Result(seed, program.mode, "different", f"outside of a step: {type(error).__name__}: {error}")
    return Result(seed, program.mode, verdict.kind.value, str(verdict), tuple(sorted(program.names())))


def _work(seeds: range, drawn: Drawn, results: Any, current: Any) -> None:
    prepare()
    from tests.fuzz.outcomes import warnings_of_vdnn

    with warnings_of_vdnn() as said:
        for seed in seeds:
            current.value = seed
            said.clear()
            results.send(result_of(seed, drawn))
    results.send(None)


class _Worker:
    """A process that runs every n-th seed. If it dies, another process continues after the seed that it died of."""

    def __init__(self, seeds: range, drawn: Drawn) -> None:
        self._seeds, self._drawn = seeds, drawn
        self._start(seeds)

    def _start(self, seeds: range) -> None:
        context = multiprocessing.get_context("spawn")
        self.results, sender = context.Pipe(duplex=False)
        self._current = context.Value("q", seeds.start, lock=False)
        self._process = context.Process(target=_work, args=(seeds, self._drawn, sender, self._current), daemon=True)
        self._process.start()
        sender.close()

    def received(self) -> Result | None:
        """The next result, or None at the end."""
        try:
            result: Result | None = self.results.recv()
        except EOFError:
            self._process.join()
            return self._died(self._process.exitcode or 0)
        return result

    def _died(self, status: int) -> Result:
        if status >= 0:
            raise RuntimeError(f"a worker ended with status {status} by itself: see above")
        seed = self._current.value
        self._start(self._seeds[self._seeds.index(seed) + 1 :])
        return Result(seed, self._drawn.mode or "drawn mode", "crash", f"the process died of signal {-status}")

    def stop(self) -> None:
        self._process.terminate()


def _results(workers: list[_Worker]) -> Iterator[Result | None]:
    """Yields results as they arrive, and None now and then so that the caller can report progress."""
    from multiprocessing.connection import wait

    running = {worker.results: worker for worker in workers}
    while running:
        for ready in wait(list(running), timeout=1.0):
            worker = running.pop(ready)  # type: ignore[call-overload]
            result = worker.received()
            if result is not None:
                running[worker.results] = worker
                yield result
        yield None


def run_many(first_seed: int, programs: int, workers: int, drawn: Drawn, seconds: float = float("inf")) -> Summary:
    summary = Summary(first_seed, programs)
    seeds = range(first_seed, first_seed + programs)
    running = [_Worker(seeds[index::workers], drawn) for index in range(workers)]
    said = time.monotonic()
    try:
        for result in _results(running):
            if result is not None:
                summary.add(result)
            if time.monotonic() - said > _SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                print(summary.line(), flush=True)
            if said - summary.began > seconds:
                print(f"{seconds:.0f} s are over", flush=True)
                break
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        for worker in running:
            worker.stop()
    print(summary, flush=True)
    return summary


if __name__ == "__main__":
    sys.exit(main())
