"""`vdnn advise`: imports the user's function, examines the training that it makes, and prints the advice."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from vdnn.cli.command_line import INTERRUPTED, say_error
from vdnn.cli.plan_command import find_function
from vdnn.errors import VdnnError
from vdnn.hardware import profile_names
from vdnn.requirements import require_core, require_torch


def add_advise_command(commands: Any) -> None:
    command: argparse.ArgumentParser = commands.add_parser(
        "advise",
        help="says what would make a training faster or smaller, and by how much. Needs no GPU",
        usage="%(prog)s TRAINING [--batch N] [--hardware NAME] [--budget SIZE] [options]",
        description="Examines one training and says what would make it faster or smaller: watches a few real steps of "
        "its loop, then rehearses a step without data, unchanged and with each change.",
        epilog="my_training.py defines a function that returns (model, loader, optimizer), (model, loader, optimizer, "
        "loss), or an object with `model`, `loader`, `optimizer` and `loss` or `step(model, optimizer, batch)`:\n"
        "  def build():\n"
        "      model = MyNet()\n"
        "      loader = DataLoader(MyData(), batch_size=64)\n"
        "      return model, loader, torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss()\n\n"
        "With --batch it is a function of the batch size, as for `vdnn plan`, and no real step runs.\n\n"
        "examples:\n"
        "  %(prog)s my_training.py:build --hardware h100\n"
        "  %(prog)s my_model.py:build --batch 256 --optimizer adamw --budget 12GiB",
    )
    training = command.add_argument_group("the training")
    training.add_argument("function", metavar="TRAINING", help="FILE.py:FUNCTION or MODULE:FUNCTION")
    training.add_argument("--batch", type=int, metavar="N", help="the function's argument. Default: it is given none")
    training.add_argument("--optimizer", choices=("sgd", "momentum", "adamw"), help="with --batch: adds its step")
    training.add_argument("--steps", type=int, default=3, metavar="N", help="real steps to watch. Default: 3")
    card = command.add_argument_group("the card")
    card.add_argument(
        "--hardware",
        metavar="NAME",
        help=f"one of {', '.join(profile_names())}; a profile of your own (a .json file); or measured: this machine's "
        "GPU. Default: this machine's GPU, or h100",
    )
    card.add_argument("--budget", metavar="SIZE", help="memory of a step: 12GiB, or 80%%. Default: the whole card")
    output = command.add_argument_group("output")
    output.add_argument("--traceback", action="store_true", help="show where an error of your program was raised")
    output.add_argument("--json", action="store_true", help="print one JSON object")


def run_advise_command(options: argparse.Namespace) -> int:
    """Returns the exit code. 0: examined, with any result. 2: called wrongly. 130: interrupted."""
    try:
        require_torch()
        require_core()
        found = _advise(options)
    except (VdnnError, ValueError, TypeError) as error:
        say_error("vdnn advise", error, with_traceback=options.traceback)
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\nvdnn advise: interrupted\n")
        return INTERRUPTED
    sys.stdout.write((found.as_json() if options.json else str(found)) + "\n")
    return 0


def _advise(options: argparse.Namespace) -> Any:
    from vdnn.advisor.examination import advise, examine, profile_for
    from vdnn.advisor.workload_training import WorkloadTraining
    from vdnn.runtime.rehearsal.user_code import user_code

    make: Any = find_function(options.function)
    on_progress = _progress if sys.stderr.isatty() else lambda doing: None
    if options.batch is None:
        if options.optimizer is not None:
            raise ValueError("--optimizer: expected together with --batch only. A loop has an optimizer of its own.")
        with user_code(f"calling {options.function}"):
            made = make()
        parts = _loop_parts(made)
        return advise(
            **parts,
            steps=options.steps,
            hardware=options.hardware,
            budget=options.budget,
            name=options.function,
            on_progress=on_progress,
        )
    if options.batch < 1:
        raise ValueError(f"--batch: expected a number, 1 or more, got {options.batch}.")
    training = WorkloadTraining(make, options.batch, name=options.function, optimizer=options.optimizer)
    return examine(training, profile_for(options.hardware), budget=options.budget, on_progress=on_progress)


def _loop_parts(made: Any) -> dict[str, Any]:
    """The keyword arguments of vdnn.advise, from the return value of the user's function."""
    if isinstance(made, tuple) and not hasattr(made, "loader") and len(made) in (3, 4):
        return dict(zip(("model", "loader", "optimizer", "loss"), made, strict=False))
    if all(hasattr(made, name) for name in ("model", "loader", "optimizer")):
        parts = {name: getattr(made, name) for name in ("model", "loader", "optimizer")}
        return {**parts, "loss": getattr(made, "loss", None), "step": getattr(made, "step", None)}
    size = f" of {len(made)}" if isinstance(made, tuple) else ""
    raise ValueError(
        "the function must return (model, loader, optimizer), (model, loader, optimizer, loss), or an object with "
        f"`model`, `loader` and `optimizer`, but it returned a {type(made).__name__}{size}. For a function that "
        "returns (model, inputs, loss), pass --batch."
    )


def _progress(doing: str) -> None:
    """Writes one line to a terminal, over the previous one."""
    sys.stderr.write(f"\r\x1b[K{doing}")
    sys.stderr.flush()
