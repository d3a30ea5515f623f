"""Builds and loads the accelerator's extension, once, against the torch that is installed, and makes it torch's
"deferred" device.

The first build takes about half a minute; torch keeps it in its cache of extensions.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vdnn.errors import VdnnError
from vdnn.testing.deferred.recurrent import register_recurrent_layers

_SOURCES = (
    "accelerator.cpp",
    "arguments.cpp",
    "autocast.cpp",
    "deferred_call.cpp",
    "module.cpp",
    "operations.cpp",
    "shape_memory.cpp",
    "storage.cpp",
    "stream_ordered_memory.cpp",
)
TORCH_TYPE = "deferred"


def load_extension() -> Any:
    """The extension. Afterwards torch.device("deferred") exists, for the rest of the process. Call it before the
    process's first backward: torch's autograd engine counts devices then, and never again."""
    extension = _loaded_extension()
    if not _engine_has_counted_it():
        raise VdnnError(
            "the deferred accelerator was loaded too late: this process has run a backward before, and torch's "
            "autograd engine has counted its devices. Call vdnn.testing.deferred.load_extension() before the first "
            "backward: at the top of the program, or in the conftest.py of tests that have a process of their own."
        )
    return extension


@functools.cache
def _engine_has_counted_it() -> bool:
    """Asked by a backward of nothing, which needs no running accelerator."""
    nothing = torch.empty(0, device=TORCH_TYPE, requires_grad=True)
    try:
        torch.autograd.grad(nothing.view(0), nothing, torch.empty(0, device=TORCH_TYPE))
    except RuntimeError as error:
        if "device_ready_queues_" in str(error):
            return False
        raise
    return True


@functools.cache
def _loaded_extension() -> Any:
    # Shapes are asked of meta kernels, and many of those are registered by this.
    import torch._meta_registrations
    from torch.utils import backend_registration as backend
    from torch.utils import cpp_extension

    _find_ninja()
    _require_build_tools()
    here = Path(__file__).parent
    try:
        with _torch_without_spaces():
            extension = cpp_extension.load(
                f"vdnn_deferred_{torch.__version__.split('+')[0].replace('.', '_')}",
                [str(here / name) for name in _SOURCES],
                extra_cflags=["-O1", "-g0", "-std=c++20"],
                extra_include_paths=[str(here)],
                build_directory=os.environ.get("VDNN_DEFERRED_BUILD"),
            )
    except (RuntimeError, OSError) as error:
        raise VdnnError(f"the deferred accelerator could not be built: {error}") from error
    backend.rename_privateuse1_backend(TORCH_TYPE)
    torch._register_device_module(TORCH_TYPE, _device_module())  # type: ignore[no-untyped-call]
    backend.generate_methods_for_privateuse1_backend(for_storage=True)
    extension.recurrent_layers = register_recurrent_layers("PrivateUse1")
    return extension


@contextlib.contextmanager
def _torch_without_spaces() -> Iterator[None]:
    """Torch hands the folder of its libraries to the linker unquoted: one with a space in its path goes by a link."""
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
    """Where it is installed beside this Python, and that is not on PATH."""
    if shutil.which("ninja") is None:
        beside = Path(sys.executable).parent
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"


def _require_build_tools() -> None:
    """Also where it has been built before: torch asks ninja whether something has changed since."""
    from torch.utils import cpp_extension

    if shutil.which("ninja") is None:
        raise VdnnError(
            "the deferred accelerator is built on first use, and ninja is not installed: pip install ninja, or put it "
            "on PATH."
        )
    compiler = cpp_extension.get_cxx_compiler()  # type: ignore[no-untyped-call]
    if shutil.which(compiler) is None:
        raise VdnnError(
            f"the deferred accelerator is built on first use, and there is no C++ compiler: {compiler!r} is not on "
            "PATH. Install one that has C++20 (g++ 11 or clang 14), or name it in the environment variable CXX."
        )


def _device_module() -> types.ModuleType:
    """What torch looks for under torch.deferred."""
    module = types.ModuleType(TORCH_TYPE)
    answers: dict[str, Any] = {
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
    for name, answer in answers.items():
        setattr(module, name, answer)
    return module
