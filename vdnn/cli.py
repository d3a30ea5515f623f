"""The command line: `python -m vdnn <command>`. Commands are thin; what they do lives in the rooms below.

Exit codes: 0 the command did its work, 1 it did and the answer is no, 2 it was called wrongly. `doctor` works where
things are missing, so a missing GPU, driver, torch or extension is a finding and leaves the exit code at 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vdnn import __version__
from vdnn.doctor import examine, render_json, render_text
from vdnn.plan_command import add_plan_command, run_plan_command
from vdnn.report_command import add_report_command, run_report_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code; `arguments` are those of the process by default."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    if options.command == "plan":
        return run_plan_command(options)
    if options.command == "report":
        return run_report_command(options)
    return _doctor(as_json=options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vdnn", description="vdnn: activation offloading for PyTorch.")
    parser.add_argument("--version", action="version", version=f"vdnn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    doctor = commands.add_parser(
        "doctor",
        help="what this machine has for vdnn, and what each missing thing means",
        description="Reports what this machine has for vdnn. Exits with 0 whenever it could report: what is "
        "missing is a finding, not a failure. With a GPU it measures the link, which takes a second or two.",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_plan_command(commands)
    add_report_command(commands)
    return parser


def _doctor(*, as_json: bool) -> int:
    report = examine()
    sys.stdout.write(render_json(report) if as_json else render_text(report))
    return 0
