"""Part of gpu-proof: says what this machine has, and what is missing of what the other steps use.

The driver is asked first, without torch; without a GPU the exit code is 3. Then tools, packages and torch are named,
each on a line, and the first work is done on the GPU. It needs the standard library alone. `--driver PATH` asks another
driver library, to try the program.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NO_GPU = 3
TOOLS = ("nvcc", "cmake", "ninja", "make", "g++", "git", "nvidia-smi")
# Packages by what needs them. Without torch nothing runs; without others some steps do not.
PACKAGES = {
    "to build": ("setuptools", "pybind11", "cmake", "ninja"),
    "to run": ("torch", "numpy"),
    "for tests": ("pytest", "hypothesis", "pytest_benchmark", "pytest_timeout", "xdist"),
    "if there": ("scipy", "transformers", "timm", "torchvision", "trl", "torchtune", "deepspeed"),
}


def count_gpus(library: str) -> tuple[int, str]:
    """The number of GPUs, and why there is none."""
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        return 0, f"the CUDA driver library cannot be loaded ({error})"
    status, count = driver.cuInit(0), ctypes.c_int(0)
    if status != 0:
        return 0, f"cuInit returned {status}"
    driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value, "" if count.value else "the driver sees none"


def tools_found() -> tuple[list[str], list[str]]:
    """Tools on PATH with their versions, and those that are missing."""
    found = [f"{tool} {_version_of(tool)}" for tool in TOOLS if shutil.which(tool)]
    return found, [tool for tool in TOOLS if not shutil.which(tool)]


def _version_of(tool: str) -> str:
    if tool == "nvidia-smi":
        return ""
    try:
        done = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({type(error).__name__})"
    words = re.split(r"[\s,()]+", done.stdout)
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def packages_found() -> tuple[list[str], list[str]]:
    """Packages with their versions, and those that are missing with what they are for. None is imported."""
    found, missing = [], []
    for purpose, names in PACKAGES.items():
        for name in names:
            if importlib.util.find_spec(name) is None:
                missing.append(f"{name} ({purpose})")
                continue
            distribution = {"xdist": "pytest-xdist"}.get(name, name.replace("_", "-"))
            try:
                found.append(f"{name} {importlib.metadata.version(distribution)}")
            except importlib.metadata.PackageNotFoundError:
                found.append(name)
    return found, missing


def torch_lines(*, on_gpu: bool) -> list[str]:
    """Lines on torch and the GPU, after a first product there. Raises what torch raises."""
    began_s = time.monotonic()
    torch: Any = importlib.import_module("torch")
    lines = [f"torch {torch.__version__} for CUDA {torch.version.cuda}, imported in {time.monotonic() - began_s:.1f} s"]
    if not on_gpu:
        return lines
    began_s = time.monotonic()
    x = torch.ones(256, 256, device="cuda")
    total = float((x @ x).sum())
    if total != 256.0**3:
        raise RuntimeError(f"expected {256.0**3} from a product on the GPU, got {total}")
    lines.append(f"first product on the GPU: {time.monotonic() - began_s:.1f} s")
    properties = torch.cuda.get_device_properties(0)
    free, total_bytes = torch.cuda.mem_get_info()
    capability = f"{properties.major}.{properties.minor}"
    memory = f"{free / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free"
    lines.append(f"{properties.name}, capability {capability}, {properties.multi_processor_count} SMs, {memory}")
    lines.append(f"cuDNN {torch.backends.cudnn.version()}, allocator {torch.cuda.get_allocator_backend()}")
    return lines


def host_line() -> str:
    memory = {}
    with Path("/proc/meminfo").open() as file:
        for line in file:
            name, value = line.split(":")
            memory[name] = int(value.split()[0]) * 1024
    total, free = (memory[name] / 2**30 for name in ("MemTotal", "MemAvailable"))
    disk = shutil.disk_usage(Path.cwd()).free / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} processors, {free:.1f} of {total:.1f} GiB of memory and {disk:.1f} GiB of disk free"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_a_gpu.machine_report", description=__doc__)
    parser.add_argument("--driver", default="libcuda.so.1", metavar="PATH", help="the driver library")
    parser.add_argument("--without-gpu", action="store_true", help="ask torch for nothing on a GPU, to try the program")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the lines there")
    options = parser.parse_args(arguments)
    gpus, why_not = count_gpus(options.driver)
    report: dict[str, Any] = {"gpus": gpus, "lines": []}

    def tell(line: str) -> None:
        print(line, flush=True)
        report["lines"].append(line)
        if options.json is not None:
            options.json.write_text(json.dumps(report) + "\n")

    tell(f"{gpus} GPUs by {options.driver}" if gpus else f"no GPU: {why_not}")
    if not gpus and not options.without_gpu:
        return NO_GPU
    tell(f"Python {platform.python_version()} at {sys.executable}, {platform.platform()}")
    tell(host_line())
    for kind, (found, missing) in (("tools", tools_found()), ("packages", packages_found())):
        tell(f"{kind}: {', '.join(one.strip() for one in found)}")
        if missing:
            tell(f"{kind} that are missing: {', '.join(missing)}")
    for line in torch_lines(on_gpu=not options.without_gpu):
        tell(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
