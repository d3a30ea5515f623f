"""The command line: `vdnn <command>`, or `python -m vdnn`. Commands parse and print; other packages do the work.

Exit codes: 0 the command did its work, 1 it did and the answer is no, 2 it was called wrongly. `doctor` reports a
missing GPU, driver, torch or extension as a finding and exits with 0.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vdnn.cli.command_line import INTERRUPTED, CommandParser, program_name, say_error
from vdnn.cli.plan_command import add_plan_command, find_function, run_plan_command
from vdnn.doctor import examine, render_json, render_text
from vdnn.errors import LibraryMissingError, VdnnError
from vdnn.hardware import profile_names
from vdnn.requirements import require_core, require_torch
from vdnn.version import __version__

_BROKEN_PIPE = 141  # the exit code that a shell reports for a program whose reader closed the pipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. `arguments` defaults to those of the process."""
    try:
        try:
            return _parsed_and_run(arguments)
        finally:
            sys.stdout.flush()  # also behind --help, which ends by an exception
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `vdnn doctor | head -1`
        # Python flushes stdout again at exit, which would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _parsed_and_run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    if options.command == "plan":
        return run_plan_command(options)
    if options.command == "advise":
        return run_advise_command(options)
    if options.command == "report":
        return run_report_command(options)
    return _doctor(as_json=options.json)


def _parser() -> CommandParser:
    name = program_name()
    parser = CommandParser(
        prog=name,
        usage="%(prog)s COMMAND [options]",
        description="Trains PyTorch models whose activations do not fit the GPU: tensors that the backward pass needs "
        "are offloaded to host memory, recomputed or compressed, according to a plan.",
        epilog="examples:\n"
        "  %(prog)s doctor\n"
        "  %(prog)s plan my_model.py:build --batch 256 --hardware titan-x --save run\n"
        "  %(prog)s report run --html report.html\n\n"
        "Training itself needs no command:\n"
        "  with vdnn.offload(budget='12GiB'):\n"
        "      ...  # the training loop, unchanged\n\n"
        "`%(prog)s COMMAND --help` shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"vdnn {__version__}", help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", prog=name)
    _add_doctor(commands)
    add_plan_command(commands)
    add_report_command(commands)
    add_advise_command(commands)
    return parser


def _add_doctor(commands: Any) -> None:
    doctor: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="shows what this machine has for vdnn, and what that means",
        usage="%(prog)s [--json]",
        description="Reports what this machine has for vdnn: the native core, torch, driver, GPUs, the link, host "
        "memory and its limits, and what the host needs to issue a step, beside the host of a hardware profile. Exits "
        "with 0 also if something is missing: that is a finding, not a failure. It measures the host, which takes a "
        "few seconds, and keeps the figures for `vdnn plan --host-speed measured`; with a GPU also the link.",
        epilog="examples:\n  %(prog)s\n  %(prog)s --json > doctor.json",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _doctor(*, as_json: bool) -> int:
    report = examine()
    sys.stdout.write(render_json(report) if as_json else render_text(report))
    return 0


# `vdnn report`: shows the results of a run as text, a page, pictures, or a trace.


def add_report_command(commands: Any) -> None:
    command: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="shows a run as text, a page, pictures or a trace",
        usage="%(prog)s RUN [--html FILE] [--figures FOLDER] [--trace FILE]",
        description="Reads a run and prints its results, or writes them as a page, pictures or a trace. A run is a "
        "folder with cells.jsonl or steps/. Benchmarks, session.save(folder) and `vdnn plan ... --save folder` "
        "write one.",
        epilog="examples:\n  %(prog)s run\n  %(prog)s run --html report.html --trace trace.json",
    )
    command.add_argument_group("input").add_argument("run", metavar="RUN", help="the folder of the run")
    output = command.add_argument_group("output (default: text, to the terminal)")
    output.add_argument("--html", metavar="FILE", help="one page that needs nothing else")
    output.add_argument("--figures", metavar="FOLDER", help="every figure, as PNG and SVG")
    output.add_argument("--trace", metavar="FILE", help="the steps, for chrome://tracing and ui.perfetto.dev")


def run_report_command(options: argparse.Namespace) -> int:
    """Returns the exit code. 0: done. 2: called wrongly, or matplotlib is missing."""
    try:
        return _report(options)
    except (VdnnError, OSError) as error:
        sys.stderr.write(f"vdnn report: {error}\n")
        return 2


def _report(options: argparse.Namespace) -> int:
    from vdnn.report import read_run, text_summary, write_figures, write_html, write_trace
    from vdnn.report.drawing import require_matplotlib

    run = read_run(options.run)
    if options.trace is not None:
        _require_place_of_file(options.trace)
        count = write_trace(run, options.trace)
        _print_written(f"{options.trace}: {count} timelines" if count else f"{options.trace}: empty, no timelines")
    if options.html is not None:
        _require_place_of_file(options.html)
        write_html(run, options.html)
        _print_written(options.html)
        try:
            require_matplotlib()
        except LibraryMissingError as missing:
            sys.stderr.write(f"vdnn report: the page has no figures: {missing}\n")
    if options.figures is not None:
        if Path(options.figures).exists() and not Path(options.figures).is_dir():
            raise VdnnError(f"{options.figures}: expected a folder for --figures, got a file.")
        paths = write_figures(run, options.figures)
        _print_written(f"{options.figures}: {len(paths)} files")
    if options.trace is None and options.html is None and options.figures is None:
        sys.stdout.write(text_summary(run))
    return 0


def _require_place_of_file(path: str) -> None:
    if Path(path).is_dir():
        raise VdnnError(f"{path}: expected a file to write, got a folder.")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise VdnnError(f"{path}: the folder {folder} does not exist. Make it first.")


def _print_written(what: str) -> None:
    sys.stdout.write(f"wrote {what}\n")


# `vdnn advise`: imports the user's function, examines the training that it makes, and prints the advice.


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
    from vdnn.advisor.parts import WorkloadTraining
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
