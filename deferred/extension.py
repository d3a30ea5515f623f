"""Builds and loads the accelerator's extension against the installed torch, and registers it as device "deferred".

The first build takes about half a minute. torch's cache of extensions keeps one library for each version of the
sources, of torch and of Python, whichever checkout they are in.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from deferred.recurrent import register_recurrent_layers
from vdnn.errors import VdnnError

_SOURCE = "extension.cpp"  # which includes the others
_CORE = Path(__file__).parents[1] / "csrc"  # has the header of the functions that the simulated device offers
_FLAGS = ["-O1", "-g0", "-std=c++20"]
TORCH_TYPE = "deferred"


def load_extension() -> Any:
    """Loads the extension. Afterwards torch.device("deferred") exists for the rest of the process.

    Call this before the process's first backward: torch's autograd engine counts the devices once, at that time.
    """
    extension = _loaded_extension()
    if not _engine_knows_device():
        raise VdnnError(
            "the deferred accelerator was loaded too late: this process has run a backward before, and torch's "
            "autograd engine has counted its devices. Call deferred.load_extension() before the first "
            "backward: at the top of the program, or in the conftest.py of tests that have a process of their own."
        )
    return extension


@functools.cache
def _engine_knows_device() -> bool:
    """Runs a backward of empty tensors, which needs no running accelerator."""
    empty = torch.empty(0, device=TORCH_TYPE, requires_grad=True)
    try:
        torch.autograd.grad(empty.view(0), empty, torch.empty(0, device=TORCH_TYPE))
    except RuntimeError as error:
        if "device_ready_queues_" in str(error):
            return False
        raise
    return True


@functools.cache
def _loaded_extension() -> Any:
    # Registers many of the meta kernels, which the extension asks for shapes.
    import torch._meta_registrations
    from torch.utils import backend_registration as backend
    from torch.utils import cpp_extension

    folder = Path(__file__).parent
    name = f"vdnn_deferred_{torch.__version__.split('+')[0].replace('.', '_')}"
    key = key_of_build(folder)
    build = os.environ.get("VDNN_DEFERRED_BUILD") or cpp_extension._get_build_directory(
        f"{name}_{key[:16]}", verbose=False
    )
    Path(build).mkdir(parents=True, exist_ok=True)
    built = Path(build) / "built"  # has the key of the library beside it, once that is complete
    try:
        with one_build_at_a_time(Path(build)):
            if built.is_file() and built.read_text() == key:
                extension = cpp_extension._import_module_from_library(  # type: ignore[no-untyped-call]
                    name, build, is_python_module=True
                )
            else:
                extension = _build(name, folder, build)
                built.write_text(key)
    except (RuntimeError, OSError, ImportError) as error:
        raise VdnnError(f"the deferred accelerator could not be built: {error}") from error
    backend.rename_privateuse1_backend(TORCH_TYPE)
    torch._register_device_module(TORCH_TYPE, _device_module())  # type: ignore[no-untyped-call]
    backend.generate_methods_for_privateuse1_backend(for_storage=True)
    extension.recurrent_layers = register_recurrent_layers("PrivateUse1")
    return extension


def key_of_build(folder: Path) -> str:
    """A hash of all that the built library depends on. Equal sources in another folder have the same key."""
    from torch.utils import cpp_extension

    said = hashlib.sha256()
    compiler = cpp_extension.get_cxx_compiler()  # type: ignore[no-untyped-call]
    for fact in (torch.__version__, sys.implementation.cache_tag, compiler, *_FLAGS):
        said.update(f"{fact}\n".encode())
    shared = _CORE / "bindings" / "sim_table.h"
    for source in (*sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]), shared):
        said.update(source.name.encode() + b"\n" + source.read_bytes())
    return said.hexdigest()


def _build(name: str, folder: Path, build: str) -> Any:
    from torch.utils import cpp_extension

    _find_ninja()
    _require_build_tools()
    with _torch_without_spaces():
        return cpp_extension.load(
            name,
            [str(folder / _SOURCE)],
            extra_cflags=_FLAGS,
            extra_include_paths=[str(folder), str(_CORE)],
            build_directory=build,
        )


@contextlib.contextmanager
def one_build_at_a_time(build: Path) -> Iterator[None]:
    """Holds a lock on the build folder, and removes the lock file that a killed build of torch's leaves behind.

    torch waits for its lock file for ever. The kernel releases this lock when its process ends, however it ends.
    """
    with (build / "vdnn.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (build / "lock").unlink(missing_ok=True)
        yield


@contextlib.contextmanager
def _torch_without_spaces() -> Iterator[None]:
    """torch passes its library folder to the linker unquoted. If the path has a space, this uses a symbolic link."""
    from torch.utils import cpp_extension

    libraries = cpp_extension.TORCH_LIB_PATH
    if " " not in libraries:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / "torch_lib"
        link.symlink_to(libraries)
        cpp_extension.TORCH_LIB_PATH = str(link)
        try:
            yield
        finally:
            cpp_extension.TORCH_LIB_PATH = libraries


def _find_ninja() -> None:
    """Adds the folder of this Python to PATH if ninja is not on PATH: pip installs it there."""
    if shutil.which("ninja") is None:
        folder = Path(sys.executable).parent
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"


def _require_build_tools() -> None:
    """Raises if ninja or a compiler is missing. A library that is built already needs neither."""
    from torch.utils import cpp_extension

    if shutil.which("ninja") is None:
        raise VdnnError(
            "the deferred accelerator is built on first use, and ninja is not installed. Run pip install ninja, or put "
            "it on PATH."
        )
    compiler = cpp_extension.get_cxx_compiler()  # type: ignore[no-untyped-call]
    if shutil.which(compiler) is None:
        raise VdnnError(
            f"the deferred accelerator is built on first use, and there is no C++ compiler: {compiler!r} is not on "
            "PATH. Install one with C++20 (g++ 11 or clang 14), or name one in the environment variable CXX."
        )


def _device_module() -> types.ModuleType:
    """The module torch.deferred, with the functions that torch expects of a device."""
    module = types.ModuleType(TORCH_TYPE)
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda index: None,
        "_is_in_bad_fork": lambda: False,
        "manual_seed": lambda seed: None,  # operations draw from the CPU's generator
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
