"""Uses the commands of an installed vdnn as a new user does. Run by the python of an environment that has torch.

    python check_commands.py FOLDER

FOLDER is empty. `vdnn doctor`, `vdnn plan` of a model in a file there, and `vdnn report` of the saved run have to work,
and `pip check` has to report nothing. This is a program, not a test module. It imports nothing from the checkout, which
must not stand in for the installed package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent
MODEL = """
import torch

def build(batch):
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers), torch.randn(batch, 1024)
"""
PLAN = ["vdnn", "plan", "my_model.py:build", "--batch", "4096", "--hardware", "titan-x", "--budget", "min"]
# Each command, and text that its output has to contain.
COMMANDS = [
    (["vdnn", "doctor"], "extension     "),
    (["vdnn", "plan", "my_model:build", "--batch", "4096", "--no-bound"], "my_model:build, batch 4096, on h100"),
    ([*PLAN, "--save", "run"], "certified: "),
    (["vdnn", "report", "run"], "build, batch 4096 on virtual titan-x"),
    (
        ["vdnn", "report", "run", "--html", "page.html", "--figures", "figures", "--trace", "trace.json"],
        "wrote page.html",
    ),
    (["python", "-m", "pip", "--disable-pip-version-check", "check"], "No broken requirements found."),
]


def main() -> int:
    folder = Path(sys.argv[1])
    (folder / "my_model.py").write_text(MODEL)
    for (program, *arguments), expected in COMMANDS:
        done = subprocess.run(
            [str(BIN / program), *arguments], cwd=folder, env={"HOME": str(folder)}, capture_output=True, text=True
        )
        shown = f"commands: {program} {' '.join(arguments)}"
        if done.returncode or done.stderr or expected not in done.stdout:
            print(f"{shown}: FAILED with {done.returncode}, expected {expected!r} in\n{done.stdout}\n{done.stderr}")
            return 1
        print(f"{shown}: as expected")
    page = (folder / "page.html").read_text()
    if "<svg" not in page or not any((folder / "figures").iterdir()):
        print("commands: FAILED: the page has no figures")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
