"""Checks an installed vdnn in an environment that has nothing else. Run by that environment's own python.

    python check_wheel.py --device-code present|absent

The environment has no torch, no compiler and no build tools, and PATH is empty for subprocesses. Checks that the
package and the native core import from the environment, that the core links no library of torch's or CUDA's except the
driver, that the doctor reports correctly, also as the command `vdnn`, and that using the runtime without torch gives
one clear sentence. This is a program, not a test module: pytest's own environment has torch.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


class CheckFailed(Exception):
    """A promise about the installed wheel does not hold; the text says which."""


def expect(holds: bool, promise: str) -> None:
    if not holds:
        raise CheckFailed(promise)


def check_imports() -> None:
    expect(importlib.util.find_spec("torch") is None, "the environment has no torch")
    for name in ("vdnn", "vdnn._C"):
        module = importlib.import_module(name)
        path = Path(str(module.__file__)).resolve()
        expect(path.is_relative_to(Path(sys.prefix).resolve()), f"{name} comes from the environment, not {path}")
    package = Path(str(importlib.import_module("vdnn").__file__)).parent
    for file in ("_C.pyi", "py.typed"):
        expect((package / file).is_file(), f"{file} is in the wheel")
    expect((package / "planning" / "published" / "README.md").is_file(), "the policies' table is in the wheel")
    expect(not list(package.rglob("*.cpp")), "no sources of C++ are in the wheel")
    expect(importlib.util.find_spec("deferred") is None, "the deferred accelerator stays in the repository")
    hardware = importlib.import_module("vdnn.hardware")
    expect("titan-x" in hardware.profile_names(), f"hardware profiles are in the wheel, not {hardware.profile_names()}")


def check_the_core_is_of_no_torch() -> None:
    """The core links neither torch nor CUDA and opens the driver by name, so one wheel serves all their versions."""
    core = Path(str(importlib.import_module("vdnn._C").__file__)).read_bytes()
    for library in (b"libtorch", b"libc10", b"libcudart", b"libnvrtc"):
        expect(library not in core, f"the native core does not name {library.decode()}")
    expect(b"libcuda.so.1" in core, "it names the driver, which it opens at run time")


def run_doctor(*options: str, start: tuple[str, ...] = (sys.executable, "-m", "vdnn")) -> str:
    # An empty environment has no PATH, so neither a compiler nor nvcc can be found.
    done = subprocess.run(
        [*start, "doctor", *options],
        env={},
        capture_output=True,
        text=True,
        timeout=900,
    )
    expect(done.returncode == 0, f"doctor {' '.join(options)} exits with 0, not {done.returncode}: {done.stderr}")
    expect(done.stderr == "", f"doctor {' '.join(options)} says nothing on stderr, not {done.stderr!r}")
    return done.stdout


def check_doctor(*, device_code: bool) -> None:
    report: dict[str, Any] = json.loads(run_doctor("--json"))
    expect(report["extension"]["present"] is True, f"the doctor sees the extension: {report['extension']}")
    expect(report["torch"]["version"] is None, f"the doctor sees no torch: {report['torch']}")
    expect(any("torch" in meaning for meaning in report["meanings"]), "the doctor says what no torch means")
    expect(len(report["codecs"]) > 0, "the doctor lists the codecs")
    for codec in report["codecs"]:
        expect(codec["available"] is device_code, f"device code is {'in' if device_code else 'not in'}: {codec}")
        expect(bool(codec["reason"]) is not device_code, f"a reason stands exactly where it is missing: {codec}")
    text = run_doctor(start=(str(Path(sys.executable).parent / "vdnn"),))
    version = importlib.metadata.version("vdnn")
    expect(
        text.startswith(f"vdnn {version}, "), f"command and metadata agree that this is {version}, not {text[:40]!r}"
    )
    expect(max(map(len, text.splitlines())) <= 200, "the text form has no endless lines")


def check_runtime_names_torch() -> None:
    vdnn = importlib.import_module("vdnn")
    try:
        _ = vdnn.offload
    except vdnn.VdnnError as error:
        sentence = str(error)
    else:
        raise CheckFailed("vdnn.offload raises where there is no torch")
    expect("\n" not in sentence and "torch>=2.10" in sentence, f"one sentence names torch>=2.10: {sentence!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device-code", choices=("present", "absent"), required=True)
    options = parser.parse_args()
    try:
        check_imports()
        check_the_core_is_of_no_torch()
        check_doctor(device_code=options.device_code == "present")
        check_runtime_names_torch()
    except CheckFailed as failed:
        print(f"wheel: FAILED: expected that {failed}")
        return 1
    print(f"wheel: all promises hold, device code {options.device_code}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
