"""Writes the pictures and the page of vdnn.report for the run of a sweep. It only reads the run.

    python -m benchmarks.figures RUN [FOLDER]

Pictures go to FOLDER, by default RUN/figures, and the page to report.html beside them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vdnn.errors import VdnnError
from vdnn.report.figures import write_figures
from vdnn.report.page import write_html


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a sweep")
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="default RUN/figures")
    options = parser.parse_args(arguments)
    folder: Path = options.folder or options.run / "figures"
    page = folder / "report.html"
    try:
        written = write_figures(options.run, folder)
        write_html(options.run, page)
    except VdnnError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    print(f"figures: {len(written)} files in {folder}, and {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
