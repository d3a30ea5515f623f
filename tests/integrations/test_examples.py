"""Every program in examples/ runs, tiny and on the CPU, offloads storages and reports it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.patience import run_to_its_end

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

# The program, the packages it needs, and its arguments.
CALLS = [
    ("resnet_loop.py", [], ["--device", "sim"]),
    ("state_on_the_host.py", [], ["--device", "sim"]),
    ("lora.py", ["transformers", "peft"], ["--device", "sim"]),
    ("lightning_fit.py", ["lightning"], ["--device", "sim"]),
    ("gpt_trainer.py", ["transformers", "accelerate"], ["--use_cpu", "true", "--vdnn_device", "sim"]),
    ("trainer_on_a_virtual_machine.py", ["transformers", "accelerate"], []),
    ("ddp.py", [], ["--device", "titan-x"]),
    ("video_lora.py", ["peft"], ["--device", "titan-x", "--budget", "12MiB"]),
    ("grpo.py", ["transformers", "peft"], ["--device", "titan-x", "--budget", "2200KiB"]),
    ("mixture.py", ["transformers"], ["--device", "titan-x", "--budget", "8MiB"]),
    ("fsdp2_long.py", ["transformers"], ["--device", "titan-x", "--budget", "min", "--tokens", "256"]),
]
OF_RANKS = {"ddp.py", "fsdp2_long.py"}
OF_TRAINER = ["--max_steps", "4", "--report_to", "none", "--vdnn_min_bytes", "4KiB", "--save_strategy", "no"]


@pytest.mark.parametrize(("name", "libraries", "arguments"), CALLS, ids=[call[0] for call in CALLS])
def test_an_example_runs_and_moves_bytes(tmp_path: Path, name: str, libraries: list[str], arguments: list[str]) -> None:
    for library in libraries:
        pytest.importorskip(library)
    if name == "gpt_trainer.py":
        arguments = [*arguments, *OF_TRAINER, "--output_dir", str(tmp_path)]
    port = free_port()
    ranks = [as_torchrun_has(rank, port) for rank in range(2)] if name in OF_RANKS else [{}]
    for said in run_together(EXAMPLES / name, arguments, tmp_path, ranks):
        assert_moved(said)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def as_torchrun_has(rank: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives a rank of two. It starts an interpreter for each."""
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    return {**{name: str(value) for name, value in named.items()}, "MASTER_ADDR": "localhost"}


def run_together(
    script: Path, arguments: list[str], folder: Path, environments: list[dict[str, str]]
) -> list[forked.Ended]:
    of_all = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        forked.start(forked.run_script, script, *arguments, folder=folder, environment={**of_all, **one})
        for one in environments
    ]
    return [one.end() for one in started]


@pytest.mark.full
def test_torchrun_starts_the_example_of_ranks(tmp_path: Path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    assert_moved(run_to_its_end([*start, EXAMPLES / "ddp.py", "--device", "titan-x"], cwd=tmp_path, env=environment))


def assert_moved(said: forked.Ended | subprocess.CompletedProcess[str]) -> None:
    assert said.returncode == 0, said.stderr
    moved = [int(count) for count in re.findall(r"offloaded (\d+) storages", said.stdout)]
    assert moved, said.stdout
    assert all(moved)


# How the same program reads without vdnn, besides the imports and lines that are removed.
IN_PLACE_OF = {
    "gpt_trainer.py": {
        "HfArgumentParser((TrainingArguments, OffloadArguments))": "HfArgumentParser(TrainingArguments)",
        "training, offloading = ": "(training,) = ",
        ", callbacks=[OffloadCallback(offloading)]": "",
    },
    "lightning_fit.py": {},
}


def without_vdnn(name: str) -> tuple[list[str], list[str]]:
    """The example's lines below its docstring, and the lines of the same program without vdnn."""
    with_it = (EXAMPLES / name).read_text().split('"""', 2)[2].splitlines()
    text = "\n".join(line for line in with_it if "from vdnn" not in line)
    for ours, plain in IN_PLACE_OF[name].items():
        assert text.count(ours) == 1
        text = text.replace(ours, plain)
    return with_it, [line for line in text.splitlines() if "OffloadCallback" not in line]


@pytest.mark.parametrize("name", list(IN_PLACE_OF))
def test_a_trainer_takes_no_more_than_one_line_beside_its_import(name: str) -> None:
    with_it, plain = without_vdnn(name)
    imports = [line for line in with_it if "from vdnn" in line]
    assert imports
    assert len(with_it) - len(plain) <= len(imports) + 1
    assert not [line for line in plain if "vdnn" in line.lower() or "offload" in line.lower()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "ours", "both"),
    [
        (
            "gpt_trainer.py",
            ["--vdnn_device", "sim", "--vdnn_min_bytes", "4KiB"],
            [*OF_TRAINER[:4], "--use_cpu", "true"],
        ),
        ("lightning_fit.py", [], ["--device", "sim"]),
    ],
)
def test_the_program_without_that_line_trains_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    ours: list[str],
    both: list[str],
) -> None:
    pytest.importorskip("transformers" if name == "gpt_trainer.py" else "lightning")
    with_it, plain = without_vdnn(name)
    if name == "gpt_trainer.py":
        both = [*both, "--output_dir", str(tmp_path), "--save_strategy", "no", "--disable_tqdm", "true"]
    losses = []
    monkeypatch.chdir(tmp_path)
    for lines, arguments in ((plain, both), (with_it, [*ours, *both])):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        exec(compile("\n".join(lines), name, "exec"), {"__name__": "__main__"})
        losses += re.findall(r"^loss (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(losses) == 2
    assert losses[0] == losses[1]


def test_every_example_is_run() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(call[0] for call in CALLS)
