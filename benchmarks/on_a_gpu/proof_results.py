"""Results of a part of gpu-proof, written so that a stop at any moment loses nothing that was there.

A part's programs write into its work folder. This copies what matters into the folder of results while they run, in few
files: `gpu_PART.jsonl` (a line for each step, and each row that a step's program writes), `gpu_PART.log` (all output),
`gpu_PART.txt` (the verdicts so far), and behind each step `gpu_PART.tar.gz` (the work folder with plans and timelines).
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

FORMAT = 3
# Files are archived from the smallest up, until they are as many bytes together: the large ones are recordings.
ARCHIVED_BYTES = 120 << 20


class Results:
    """The files of one part. `work` is where its programs write: rows to files `*.jsonl`, logs to `logs/`."""

    def __init__(self, folder: Path, name: str, work: Path) -> None:
        self.folder = folder
        self._work = work
        self.rows_path, self.log_path, self.verdicts_path, self.archive_path = (
            folder / f"{name}{suffix}" for suffix in (".jsonl", ".log", ".txt", ".tar.gz")
        )
        self._read: dict[Path, int] = {}
        self._step = ""

    def begin(self) -> None:
        """Empty the files. Called once there is a GPU, so that results of another machine stay until then."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (self.rows_path, self.log_path, self.verdicts_path):
            path.write_text("")
        self.archive_path.unlink(missing_ok=True)

    def begin_step(self, step: str) -> None:
        self._step = step
        with self.log_path.open("a") as log:
            log.write(f"\n=== {step} ===\n")

    def follow(self) -> None:
        """Copy what the work folder has more than at the last call: lines of its logs, and complete rows."""
        # Of the steps, and of a sweep's cells.
        for path in sorted((*self._work.glob("logs/*.log"), *self._work.glob("*/logs/*.txt"))):
            more = self._more(path)
            if more:
                with self.log_path.open("ab") as log:
                    log.write(more)
        for path in sorted(self._work.rglob("*.jsonl")):
            more = self._more(path, only_lines=True)
            for line in more.splitlines():
                self._write({"step": self._step, "from": str(path.relative_to(self._work)), "row": _value(line)})

    def _more(self, path: Path, *, only_lines: bool = False) -> bytes:
        begin = self._read.get(path, 0)
        if path.stat().st_size < begin:
            begin = 0  # the program has begun its file anew
        with path.open("rb") as file:
            file.seek(begin)
            more = file.read()
        if only_lines:
            more = more[: more.rfind(b"\n") + 1]
        self._read[path] = begin + len(more)
        return more

    def write_outcome(self, outcome: dict[str, Any], verdicts: str) -> None:
        self._write({"format": FORMAT, **outcome})
        fresh = self.verdicts_path.with_suffix(".part")
        fresh.write_text(verdicts + "\n")
        fresh.replace(self.verdicts_path)

    def _write(self, value: object) -> None:
        with self.rows_path.open("a") as lines:
            lines.write(json.dumps(value) + "\n")

    def archive(self) -> None:
        """Archive the work folder under another name, and rename it: a reader always finds a complete archive."""
        files = sorted((path.stat().st_size, path) for path in self._work.rglob("*") if path.is_file())
        fresh = self.archive_path.with_suffix(".part")
        left = ARCHIVED_BYTES
        with tarfile.open(fresh, "w:gz", compresslevel=3) as archive:
            for size, path in files:
                left -= size
                if left >= 0:
                    archive.add(path, self._work.name / path.relative_to(self._work))
        fresh.replace(self.archive_path)


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line.decode(errors="replace")
