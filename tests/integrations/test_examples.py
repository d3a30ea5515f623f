"""Every program in examples/ runs, tiny and on the CPU, moves bytes and says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

# The program, what it needs, and how it is called.
CALLS = [
    ("resnet_loop.py", [], ["--device", "sim"]),
    ("lora.py", ["transformers", "peft"], ["--device", "sim"]),
    ("lightning_fit.py", ["lightning"], ["--device", "sim"]),
    ("gpt_trainer.py", ["transformers", "accelerate"], ["--use_cpu", "true", "--vdnn_device", "sim"]),
    ("ddp.py", [], ["--device", "titan-x"]),
]
OF_TRAINER = ["--max_steps", "4", "--report_to", "none", "--vdnn_min_bytes", "4KiB", "--save_strategy", "no"]


@pytest.mark.parametrize(("name", "libraries", "arguments"), CALLS, ids=[call[0] for call in CALLS])
def test_an_example_runs_and_moves_bytes(tmp_path: Path, name: str, libraries: list[str], arguments: list[str]) -> None:
    for library in libraries:
        pytest.importorskip(library)
    start = [sys.executable]
    if name == "ddp.py":
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    if name == "gpt_trainer.py":
        arguments = [*arguments, *OF_TRAINER, "--output_dir", str(tmp_path)]
    said = subprocess.run(
        [*start, str(EXAMPLES / name), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    moved = [int(count) for count in re.findall(r"offloaded (\d+) storages", said.stdout)]
    assert moved, said.stdout
    assert all(moved)


def test_every_example_is_run() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(call[0] for call in CALLS)
