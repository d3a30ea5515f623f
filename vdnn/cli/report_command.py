"""`vdnn report`: shows the results of a run as text, a page, pictures, or a trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from vdnn.errors import LibraryMissingError, VdnnError


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
        _require_folder(options.trace)
        count = write_trace(run, options.trace)
        _print_written(f"{options.trace}: {count} timelines" if count else f"{options.trace}: empty, no timelines")
    if options.html is not None:
        _require_folder(options.html)
        write_html(run, options.html)
        _print_written(options.html)
        try:
            require_matplotlib()
        except LibraryMissingError as missing:
            sys.stderr.write(f"vdnn report: the page has no figures: {missing}\n")
    if options.figures is not None:
        paths = write_figures(run, options.figures)
        _print_written(f"{options.figures}: {len(paths)} files")
    if options.trace is None and options.html is None and options.figures is None:
        sys.stdout.write(text_summary(run))
    return 0


def _require_folder(path: str) -> None:
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise VdnnError(f"{path}: the folder {folder} does not exist. Make it first.")


def _print_written(what: str) -> None:
    sys.stdout.write(f"wrote {what}\n")
