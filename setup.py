"""Builds the native core, vdnn._C, with CMake and Ninja; everything else about the package is in
pyproject.toml.

No torch is needed to build. Settings come from the environment, because every way to build passes that on:

    VDNN_NVCC=/path/of/nvcc   compile device code with this one; OFF: without; unset: use nvcc if there is one
    VDNN_BUILD_TESTING=ON     also build what the tests need, into build/testing
    VDNN_WERROR=ON            compiler warnings are errors
    VDNN_BUILD_DIRECTORY=DIR  builds there, and what is compiled there already is not compiled again

A build in the checkout (editable, or `build_ext --inplace`) keeps build/inplace and is incremental. Any other
build starts afresh, see docs/decisions/0002-wheels-are-built-afresh.md.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path(__file__).resolve().parent
SETTINGS = ("VDNN_NVCC", "VDNN_BUILD_TESTING", "VDNN_WERROR")


class CMakeExtension(Extension):
    """An extension whose sources only CMake knows."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[])


class CMakeBuild(build_ext):
    """Lets CMake build the module in a directory of its own, then puts it where setuptools expects it."""

    def run(self) -> None:
        # setuptools clears `inplace` while it builds, and copies the result into the checkout afterwards.
        self.in_checkout = bool(self.inplace)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        kept = os.environ.get("VDNN_BUILD_DIRECTORY")
        self.afresh = not (self.in_checkout or kept)
        directory = Path(self.build_temp).resolve() / "cmake" if self.afresh else SOURCE / "build" / "inplace"
        if kept:
            directory = Path(kept).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        cmake = find_tool("cmake", "CMAKE_BIN_DIR")
        jobs = str(os.cpu_count() or 1)
        with (directory / "vdnn.lock").open("w") as held:  # the kernel releases it when this process ends
            fcntl.flock(held, fcntl.LOCK_EX)
            subprocess.run([cmake, *self.configuration(directory)], check=True)
            subprocess.run([cmake, "--build", str(directory), "--parallel", jobs], check=True)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(directory / "python" / target.name), str(target))

    def configuration(self, directory: Path) -> list[str]:
        """The arguments of CMake's configure step. Tools are named each time, since an isolated build leaves
        a cache that names tools in an environment which is gone.
        """
        pybind11 = importlib.import_module("pybind11")
        arguments = ["-S", str(SOURCE), "-B", str(directory), "-G", "Ninja"]
        if self.afresh:
            arguments.append("--fresh")
        arguments += [
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja', 'BIN_DIR')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        ]
        for setting in SETTINGS:
            value = os.environ.get(setting)
            # -U, or a setting of an earlier build in this directory would silently stay.
            arguments.append(f"-U{setting}" if value is None else f"-D{setting}={value}")
        return arguments


def find_tool(name: str, directory_attribute: str) -> str:
    """The program `name`: of the Python package of that name if there is one, else on PATH."""
    try:
        directory = getattr(importlib.import_module(name), directory_attribute)
        found = shutil.which(name, path=directory) if directory else None
    except (ImportError, AttributeError):
        found = None
    found = found or shutil.which(name)
    if found is None:
        sys.exit(f"building vdnn needs {name}, which is neither a Python package here nor on PATH: pip install {name}")
    return found


setup(ext_modules=[CMakeExtension("vdnn._C")], cmdclass={"build_ext": CMakeBuild})
