"""`vdnn plan --training`: the options for whole trainings, their checks, and what is printed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from vdnn.bytesize import format_bytes
from vdnn.errors import BudgetError, InvalidArgumentError

# Options that only plans of whole trainings have: each of them implies --training.
_OF_TRAININGS = {
    "host": "--host",
    "host_cores": "--host-cores",
    "allow": "--allow",
    "micro_batches": "--micro-batches",
    "master_weights": "--master-weights",
    "clip": "--clip",
    "largest_model": "--largest-model",
    "ranks": "--ranks",
    "shard": "--shard",
}
AUTO_PASSES = "auto"
# Options that only plans of one step have, with what they are if they are not given.
_OF_STEPS = {
    "policy": ("--policy", "auto"),
    "compare": ("--compare", None),
    "min_bytes": ("--min-bytes", "1MiB"),
    "explain": ("--explain", 0),
}


def add_training_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("the whole training")
    group.add_argument(
        "--training",
        action="store_true",
        help="plan parameters, gradients and optimizer state too; each option below implies this",
    )
    group.add_argument("--host", metavar="SIZE", help="the host's memory, such as 128GiB. Default: the profile's host")
    group.add_argument("--host-cores", type=int, metavar="N", help="cores for steps on the CPU. Default: all")
    group.add_argument(
        "--allow", metavar="NAMES", help="cpu-step, deferred, in-backward, separated by commas. Default: none (exact)"
    )
    group.add_argument(
        "--micro-batches",
        metavar="N",
        help="passes of the batch before each step; auto: --batch is the whole batch, in the fastest number of passes",
    )
    group.add_argument("--master-weights", action="store_true", help="the optimizer's state and masters in float32")
    group.add_argument("--clip", action="store_true", help="gradients are clipped by their norm")
    group.add_argument("--ranks", type=int, metavar="N", help="the training runs on N cards: plan one of them")
    group.add_argument("--shard", choices=("fsdp2", "ddp"), help="with --ranks: what is cut. Default: fsdp2")
    group.add_argument("--largest-model", action="store_true", help="also look for the most layers that fit")


def batches_of(text: str) -> list[int]:
    """`--batch 4`, or `--batch 1,2,4` for a ladder."""
    found = [part.strip() for part in str(text).split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in found):
        raise ValueError(f"--batch: expected a number, 1 or more, got {text}.")
    return [int(part) for part in found]


def is_training(options: argparse.Namespace) -> bool:
    """True if the options ask for a plan of a whole training. Raises ValueError for options that exclude each other."""
    given = [flag for name, flag in _OF_TRAININGS.items() if getattr(options, name)]
    if not given and not options.training:
        return False
    for name, (flag, default) in _OF_STEPS.items():
        if getattr(options, name) != default:
            raise ValueError(
                f"{flag} and {given[0] if given else '--training'}: expected one of them. {flag} is for plans of the "
                "activations of one step, and the other for plans of whole trainings."
            )
    allow = _allowed(options)
    if options.clip and "in-backward" in allow:
        raise ValueError(
            "--clip and --allow in-backward: expected one of them. A norm of the gradients is known only after the "
            "whole backward."
        )
    if options.host_cores is not None and "cpu-step" not in allow:
        raise ValueError("--host-cores: expected --allow cpu-step beside it, because no other step uses the cores.")
    if options.shard is not None and options.ranks is None:
        raise ValueError("--shard: expected --ranks beside it, because one card has nothing to share.")
    if options.ranks is not None and options.ranks < 2:
        raise ValueError(f"--ranks: expected a number of cards, 2 or more, got {options.ranks}.")
    if options.micro_batches not in (None, AUTO_PASSES):
        passes = options.micro_batches
        if not passes.isdigit() or int(passes) < 1:
            raise ValueError(f"--micro-batches: expected a number, 1 or more, or {AUTO_PASSES}, got {passes}.")
    if options.micro_batches == AUTO_PASSES and options.largest_batch:
        raise ValueError(
            f"--micro-batches {AUTO_PASSES} and --largest-batch: expected one of them. The passes are chosen for one "
            "whole batch."
        )
    return True


def _allowed(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(part.strip() for part in options.allow.split(",")) if options.allow else ()


def plan_whole_training(
    options: argparse.Namespace,
    make: Callable[[int], Any],
    hardware: Any,
    on_progress: Callable[[str], None],
) -> int:
    """Plans and prints. Returns the exit code."""
    from vdnn.report.saved_plan import save_training_report
    from vdnn.report.training_report import TrainingReport, ladder_table
    from vdnn.runtime.rehearsal.training_ahead import terms_of

    batches = batches_of(options.batch)
    terms = terms_of(
        hardware,
        budget=options.budget,
        host=options.host,
        host_cores=options.host_cores,
        allow=_allowed(options),
        ranks=options.ranks,
        shard=options.shard,
        host_speed=options.host_speed,
    )
    planner = _Planner(options, make, terms, on_progress)
    found: dict[int, TrainingReport | str] = {}
    for batch in batches:
        try:
            found[batch] = planner.report(batch)
        except (BudgetError, InvalidArgumentError) as refused:
            if len(batches) == 1:
                raise planner.with_ways_out(refused, batch) from None
            found[batch] = f"does not fit: {refused}"
    on_progress("")
    reports = [one for one in found.values() if isinstance(one, TrainingReport)]
    if not reports:
        raise ValueError(f"--batch {options.batch}: no batch fits. The smallest: {next(iter(found.values()))}")
    if options.save is not None:
        for report in reports:
            save_training_report(options.save, report)
    if options.json:
        objects = [report.as_json() for report in reports]
        sys.stdout.write(json.dumps(objects if len(batches) > 1 else objects[0], indent=2) + "\n")
        return 0
    lines = [str(reports[-1])]
    if len(batches) > 1:
        lines += ["", ladder_table(found)]
    if options.largest_batch:
        lines.append(f"  largest batch: {planner.largest_batch(max(batches))}")
    if options.largest_model:
        lines.append(f"  largest model: {planner.largest_model(reports[-1].batch or batches[0])}")
    on_progress("")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


class _Planner:
    """Rehearses each batch once."""

    def __init__(
        self, options: argparse.Namespace, make: Callable[[int], Any], terms: Any, on_progress: Callable[[str], None]
    ) -> None:
        self._options, self._make, self._terms, self._on_progress = options, make, terms, on_progress
        self._known: dict[tuple[int, int | None, int], Any] = {}

    @property
    def _passes(self) -> int | None:
        given = self._options.micro_batches
        return None if given in (None, AUTO_PASSES) else int(given)

    def rehearsed(self, batch: int, passes: int | None = None, loss_chunks: int = 0) -> Any:
        from vdnn.runtime.rehearsal.rehearsal import subject_of
        from vdnn.runtime.rehearsal.training_ahead import rehearsed_training

        passes = self._passes if passes is None else passes
        if (batch, passes, loss_chunks) not in self._known:
            options = self._options
            self._known[batch, passes, loss_chunks] = rehearsed_training(
                subject_of(self._make, batch),
                self._terms,
                name=options.function,
                on_progress=lambda doing: self._on_progress(f"batch {batch}: {doing}"),
                optimizer=options.optimizer,
                master_weights=options.master_weights,
                micro_batches=passes,
                loss_chunks=loss_chunks,
                clips=True if options.clip else None,
            )
        return self._known[batch, passes, loss_chunks]

    def report(self, batch: int) -> Any:
        """The plan of this batch, in the fastest number of passes if the user asks for that."""
        from vdnn.runtime.rehearsal.chosen_passes import fastest_passes

        if self._options.micro_batches != AUTO_PASSES:
            return self._report(batch, None)
        return fastest_passes(batch, partial(self._report, certify=False), self._report)

    def _report(self, batch: int, passes: int | None, *, certify: bool = True) -> Any:
        from vdnn.runtime.rehearsal.training_ahead import planned_training, shown_optimizer

        return planned_training(
            self.rehearsed(batch, passes),
            self._terms,
            batch=batch,
            optimizer=shown_optimizer(self._options.optimizer, self._options.master_weights),
            certify=certify and not self._options.no_bound,
            on_progress=lambda doing: self._on_progress(f"batch {batch}: {doing}"),
        )

    def with_ways_out(self, refused: Exception, batch: int) -> Exception:
        from vdnn.runtime.rehearsal.training_ahead import times_passes
        from vdnn.runtime.rehearsal.ways_out import with_ways_out

        if not isinstance(refused, BudgetError) or self._options.micro_batches == AUTO_PASSES:
            return refused

        def rehearsed(size: int, passes: int, chunks: int) -> Any:
            return self.rehearsed(size, times_passes(self._passes, passes), chunks)

        return with_ways_out(refused, batch, rehearsed, self._on_progress)

    def largest_batch(self, first: int) -> str:
        from vdnn.planning.training.least_placement import fitting_placement, least_training_bytes
        from vdnn.runtime.rehearsal.largest_batch import CannotSearch, find_largest_batch

        host_bytes = self._terms.machine.host_bytes

        def spare_bytes(batch: int) -> float:
            training = self.rehearsed(batch).training
            budget_bytes = self._terms.budget_bytes(training)
            spare = budget_bytes - least_training_bytes(training)
            return spare if spare < 0 or fitting_placement(training, budget_bytes, host_bytes) else -1.0

        try:
            largest = find_largest_batch(spare_bytes, first=first, on_progress=self._on_progress)
        except CannotSearch as error:
            return f"not found, {error}"
        return f"{largest}, on {format_bytes(host_bytes)} of host memory"

    def largest_model(self, batch: int) -> str:
        from vdnn.planning.training.least_placement import MOST_LAYERS, largest_layers

        rehearsed = self.rehearsed(batch)
        if len(rehearsed.blocks) < 2:
            return "not found: the model has no repeated layers"
        budget_bytes = self._terms.budget_bytes(rehearsed.training)
        self._on_progress("looking for the most layers")
        most = largest_layers(rehearsed.training, rehearsed.blocks, budget_bytes, self._terms.machine.host_bytes)
        middle = rehearsed.training.units[rehearsed.blocks[len(rehearsed.blocks) // 2]]
        more = " or more" if most == MOST_LAYERS else ""
        return f"{most}{more} layers as {middle.name}; this one has {len(rehearsed.blocks)}"
