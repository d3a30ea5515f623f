"""`vdnn plan`: imports the user's function, plans a step of its model, and prints the result."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from vdnn.bytesize import format_bytes
from vdnn.cli.command_line import nearest, say_error
from vdnn.errors import BudgetError, InvalidArgumentError, RehearsalError, VdnnError
from vdnn.hardware import profile_names
from vdnn.requirements import require_core, require_torch


def add_plan_command(commands: Any) -> None:
    command: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="says whether a model fits a card, and what a step takes. Needs no GPU",
        usage="%(prog)s MODEL --batch N [--hardware NAME] [--budget SIZE] [options]",
        description="Rehearses one training step of your model without data on a card that need not be present, plans "
        "what to offload and recompute, and runs the plan in virtual time.",
        epilog="my_model.py defines a function of the batch size that returns (model, inputs), (model, inputs, loss), "
        "(model, inputs, optimizer), or an object with `model` and `step()`:\n"
        "  def build(batch):\n"
        "      return MyNet(), torch.randn(batch, 3, 224, 224)\n\n"
        "examples:\n"
        "  %(prog)s my_model.py:build --batch 256\n"
        "  %(prog)s my_model.py:build --batch 256 --hardware titan-x --budget 80%%\n"
        "  %(prog)s my_model.py:build --batch 64 --budget min --compare all\n"
        "  %(prog)s my_package.models:build --batch 64 --save run && vdnn report run\n"
        "  %(prog)s my_model.py:build --batch 1 --optimizer adamw --training",
    )
    step = command.add_argument_group("the step")
    step.add_argument("function", metavar="MODEL", help="FILE.py:FUNCTION or MODULE:FUNCTION")
    step.add_argument(
        "--batch",
        required=True,
        metavar="N",
        help="the batch size, the function's argument; several with commas for --training",
    )
    step.add_argument("--optimizer", choices=("sgd", "momentum", "adamw"), help="adds its state and its step")
    card = command.add_argument_group("the card")
    card.add_argument(
        "--hardware",
        default="h100",
        metavar="NAME",
        help=f"one of {', '.join(profile_names())}; a profile of your own (a .json file); or measured: this machine's "
        "GPU. Default: h100",
    )
    card.add_argument(
        "--host-speed",
        type=_host_speed,
        default=1.0,
        metavar="X",
        help="the host issues operations X times as fast as that of the profile; or measured: as this machine's host. "
        "Default: 1",
    )
    card.add_argument(
        "--budget",
        metavar="SIZE",
        help='memory of a step: bytes such as 12GiB, a share of the card such as 80%%, or "min". Default: the '
        "card's memory less 10 %%, as in training",
    )
    plan = command.add_argument_group("the plan")
    plan.add_argument("--policy", default="auto", metavar="NAME", help="a policy of docs/policies.md. Default: auto")
    plan.add_argument(
        "--compare", metavar="NAMES", help='several policies, separated by commas, or "all": one row for each'
    )
    plan.add_argument("--min-bytes", default="1MiB", metavar="SIZE", help="smaller saves are kept. Default: 1MiB")
    plan.add_argument("--largest-batch", action="store_true", help="also look for the largest batch that fits")
    plan.add_argument("--no-bound", action="store_true", help="do not certify how far from optimal the plan is")
    add_training_options(command)
    output = command.add_argument_group("output")
    output.add_argument(
        "--explain", type=int, default=0, metavar="N", help="show the actions of the N largest storages, and why"
    )
    output.add_argument("--save", metavar="RUN", help="add the plans to a folder that `vdnn report` reads")
    output.add_argument("--traceback", action="store_true", help="show where an error of your program was raised")
    output.add_argument("--json", action="store_true", help="print one JSON object, or a list with --compare")


def run_plan_command(options: argparse.Namespace) -> int:
    """Returns the exit code. 0: planned. 1: the budget cannot be met. 2: called wrongly."""
    try:
        require_torch()
        require_core()
        return _plan(options)
    except BudgetError as refused:
        say_error("vdnn plan", refused)
        return 1
    except (VdnnError, ValueError, TypeError) as error:
        say_error("vdnn plan", error, with_traceback=options.traceback)
        return 2


def _plan(options: argparse.Namespace) -> int:
    from vdnn.planning.catalogue import planner_names
    from vdnn.report.plan_report import comparison
    from vdnn.runtime.rehearsal.plan_ahead import compare
    from vdnn.runtime.rehearsal.rehearsal import subject_of

    whole = is_training(options)
    batches = batches_of(options.batch)
    if len(batches) > 1 and not whole:
        raise ValueError(f"--batch: expected one number without --training, got {options.batch!r}.")
    if options.explain < 0:
        raise ValueError(f"--explain: expected a number of storages, got {options.explain}.")
    if options.save is not None:
        _make_folder(options.save)
    hardware = _measured() if options.hardware == "measured" else options.hardware
    make = find_function(options.function)
    on_progress = _progress if sys.stderr.isatty() else lambda doing: None
    if whole:
        return plan_whole_training(options, make, hardware, on_progress)
    options.batch = batches[0]
    policies = [options.policy]
    if options.compare is not None:
        names = options.compare.split(",")
        policies = list(planner_names()) if options.compare == "all" else [name.strip() for name in names]
    step_options: dict[str, Any] = {
        "hardware": hardware,
        "budget": options.budget,
        "optimizer": options.optimizer,
        "min_bytes": 0 if options.min_bytes == "0" else options.min_bytes,
    }
    reports = compare(
        subject_of(make, options.batch),
        policies,
        name=options.function,
        batch=options.batch,
        certify=not options.no_bound,
        explains=options.explain,
        host_speed=options.host_speed,
        on_progress=on_progress,
        **step_options,
    )
    on_progress("")
    if options.save is not None:
        _save(options, reports, hardware)
    if options.json:
        objects = [report.as_json() for report in reports]
        sys.stdout.write(json.dumps(objects if options.compare is not None else objects[0], indent=2) + "\n")
        return 0
    lines = [str(reports[0])]
    if options.largest_batch:
        budget_bytes = reports[0].planned.plan.budget_bytes
        largest = _largest_batches(make, options, budget_bytes, step_options, on_progress)
        lines.append(f"  largest batch: {largest}")
    if options.compare is not None:
        lines += ["", comparison(reports)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _host_speed(text: str) -> float | str:
    if text == "measured":
        return text
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a number or 'measured', got {text!r}") from error


def _make_folder(run: str) -> None:
    """Makes the folder ahead of the planning, which may take minutes."""
    try:
        Path(run).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--save: expected a folder, got {run!r} ({error.strerror}).") from error


def _save(options: argparse.Namespace, reports: Any, hardware: Any) -> None:
    from vdnn.hardware import load_profile
    from vdnn.report.saved_plan import save_plan_reports

    profile = load_profile(hardware) if isinstance(hardware, str) else hardware
    save_plan_reports(options.save, reports, budget=options.budget, card_bytes=profile.memory_bytes)


def _progress(doing: str) -> None:
    """Writes one line to a terminal, over the previous one."""
    sys.stderr.write(f"\r\x1b[K{doing}")
    sys.stderr.flush()


def find_function(name: str) -> Callable[[int], Any]:
    """Imports `module:function` or `file.py:function`, relative to the current directory. Raises ValueError."""
    module_name, colon, function_name = name.rpartition(":")
    if not colon or not module_name or not function_name:
        raise ValueError(f"expected MODULE:FUNCTION or FILE.py:FUNCTION, such as my_model.py:build, got {name!r}.")
    module = _imported_file(module_name) if module_name.endswith(".py") else _imported_module(module_name)
    found: Any = module
    for part in function_name.split("."):
        if not hasattr(found, part):
            near = nearest(part, (name for name in vars(found) if not name.startswith("_")))
            raise ValueError(f"the module {module_name!r} has no {function_name!r}{near or '.'}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{name}: expected a function of a batch size, got an object of type {type(found).__name__}.")
    function: Callable[[int], Any] = found
    return function


def _imported_module(name: str) -> ModuleType:
    from vdnn.runtime.rehearsal.user_code import user_code

    # Unlike `python -m vdnn`, the installed `vdnn` program does not have the current directory on sys.path.
    current = str(Path.cwd())
    if current not in sys.path:
        sys.path.insert(0, current)
    try:
        with user_code(f"importing {name}"):
            return importlib.import_module(name)
    except RehearsalError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == name:
            raise ValueError(f"the module {name!r} cannot be imported from {current}: {error.__cause__}.") from error
        raise


def _imported_file(name: str) -> ModuleType:
    """Imports a file as `python FILE` runs it: the file can import modules from its own folder."""
    path = Path(name).resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {path}.")
    sys.path.insert(0, str(path.parent))
    importlib.invalidate_caches()
    module = _imported_module(path.stem)
    if Path(module.__file__ or "").resolve() != path:
        raise ValueError(
            f"{name}: a module named {path.stem!r} is imported already, from {module.__file__}. Give the file another "
            "name."
        )
    return module


def _measured() -> Any:
    """A profile of this machine's GPU: its link is measured, its compute uses the nearest profile's efficiency."""
    from vdnn.runtime.machine.measured_hardware import measured_profile

    return measured_profile()


def _largest_batches(
    make: Callable[[int], Any],
    options: argparse.Namespace,
    budget_bytes: int | None,
    step_options: dict[str, Any],
    on_progress: Callable[[str], None],
) -> str:
    from vdnn.hardware import load_profile
    from vdnn.runtime.rehearsal.largest_batch import CannotSearch, largest_batches, or_more

    hardware = step_options["hardware"]
    profile = load_profile(hardware) if isinstance(hardware, str) else hardware
    if budget_bytes is None:
        budget_bytes = profile.memory_bytes
    try:
        largest = largest_batches(
            make,
            profile,
            budget_bytes,
            first=options.batch,
            optimizer=step_options["optimizer"],
            min_bytes=step_options["min_bytes"],
            on_progress=on_progress,
        )
    except CannotSearch as error:
        return f"not found, {error}"
    finally:
        on_progress("")
    slower = f" (there a step takes {100 * (largest.slowdown - 1):.1f} % longer than if everything could be kept)"
    return (
        f"{or_more(largest.kept)} with everything kept, {or_more(largest.planned)} with plans"
        f"{slower if largest.planned > largest.kept else ''}, on {format_bytes(budget_bytes)}"
    )


# `vdnn plan --training`: the options for whole trainings, their checks, and what is printed.

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
# Options that only plans of one step have, with their defaults.
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
    """`--batch 4`, or `--batch 1,2,4` for a table of several."""
    found = [part.strip() for part in str(text).split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in found):
        raise ValueError(f"--batch: expected a number, 1 or more, got {text}.")
    return [int(part) for part in found]


def is_training(options: argparse.Namespace) -> bool:
    """True if the options ask for a plan of a whole training. Raises ValueError for options that exclude each other."""
    values = {flag: getattr(options, name) for name, flag in _OF_TRAININGS.items()}
    given = [flag for flag, value in values.items() if value is not None and value is not False]
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
    from vdnn.report.training_report import TrainingReport, batch_table
    from vdnn.runtime.rehearsal.rehearsal import subject_of
    from vdnn.runtime.rehearsal.training_ahead import TrainingAhead, terms_of

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
    passes = options.micro_batches
    ahead = TrainingAhead(
        lambda batch: subject_of(make, batch),
        terms,
        options.function,
        optimizer=options.optimizer,
        master_weights=options.master_weights,
        micro_batches=passes if passes in (None, AUTO_PASSES) else int(passes),
        clips=True if options.clip else None,
        certify=not options.no_bound,
        on_progress=on_progress,
    )
    found: dict[int, TrainingReport | str] = {}
    for batch in batches:
        try:
            found[batch] = ahead.report(batch)
        except (BudgetError, InvalidArgumentError) as refused:
            if len(batches) == 1:
                raise ahead.with_ways_out(refused, batch) if isinstance(refused, BudgetError) else refused from None
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
        lines += ["", batch_table(found)]
    if options.largest_batch:
        lines.append(f"  largest batch: {_largest_batch(ahead, max(batches), on_progress)}")
    if options.largest_model:
        lines.append(f"  largest model: {_largest_model(ahead, reports[-1], on_progress)}")
    on_progress("")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _largest_batch(ahead: Any, first: int, on_progress: Callable[[str], None]) -> str:
    from vdnn.planning.training.least_placement import fitting_placement, least_training_bytes
    from vdnn.runtime.rehearsal.largest_batch import CannotSearch, find_largest_batch, or_more

    host_bytes = ahead.terms.machine.host_bytes

    def spare_bytes(batch: int) -> float:
        training = ahead.rehearsed(batch).training
        budget_bytes = ahead.terms.budget_bytes(training)
        spare = budget_bytes - least_training_bytes(training)
        return spare if spare < 0 or fitting_placement(training, budget_bytes, host_bytes) else -1.0

    try:
        largest = find_largest_batch(spare_bytes, first=first, on_progress=on_progress)
    except CannotSearch as error:
        return f"not found, {error}"
    return f"{or_more(largest)}, on {format_bytes(host_bytes)} of host memory"


def _largest_model(ahead: Any, report: Any, on_progress: Callable[[str], None]) -> str:
    from vdnn.planning.training.least_placement import MOST_LAYERS, largest_layers

    rehearsed = ahead.rehearsed(report.batch, report.micro_batches)
    if len(rehearsed.blocks) < 2:
        return "not found: the model has no repeated layers"
    budget_bytes = ahead.terms.budget_bytes(rehearsed.training)
    on_progress("looking for the most layers")
    most = largest_layers(rehearsed.training, rehearsed.blocks, budget_bytes, ahead.terms.machine.host_bytes)
    middle = rehearsed.training.units[rehearsed.blocks[len(rehearsed.blocks) // 2]]
    more = " or more" if most == MOST_LAYERS else ""
    return f"{most}{more} layers as {middle.name}; this one has {len(rehearsed.blocks)}"
