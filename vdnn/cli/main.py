"""The command line: `vdnn <command>`, or `python -m vdnn`. Commands parse and print; other packages do the work.

Exit codes: 0 the command did its work, 1 it did and the answer is no, 2 it was called wrongly. `doctor` reports a
missing GPU, driver, torch or extension as a finding and exits with 0.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from vdnn import __version__
from vdnn.cli.advise_command import add_advise_command, run_advise_command
from vdnn.cli.command_line import INTERRUPTED, CommandParser, program_name
from vdnn.cli.plan_command import add_plan_command, run_plan_command
from vdnn.cli.report_command import add_report_command, run_report_command
from vdnn.doctor import examine, render_json, render_text

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
