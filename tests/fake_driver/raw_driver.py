"""Driver entry points called by name from Python, with signatures read from csrc/device/cuda/driver_api.h.

For tests of the fake driver itself: no native code of vdnn is between the test and the driver. `close()` destroys the
objects that the convenience methods created, unless the test has already done so.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

HEADER = Path(__file__).resolve().parents[2] / "csrc" / "device" / "cuda" / "driver_api.h"

_VALUES: dict[str, type] = {
    "unsigned": ctypes.c_uint,
    "unsigned char": ctypes.c_ubyte,
    "int": ctypes.c_int,
    "Result": ctypes.c_int,
    "DeviceOrdinal": ctypes.c_int,
    "std::size_t": ctypes.c_size_t,
    "DevicePointer": ctypes.c_ulonglong,
}


def declared_calls() -> dict[str, list[type]]:
    """Each symbol of VDNN_DRIVER_CALLS and the ctypes of its parameters; pointers and handles are c_void_p."""
    text = HEADER.read_text().replace("\\\n", " ")
    entries = re.findall(r"\bX\((\w+),\s*\(([^)]*)\)\)", text)
    return {symbol: [_parameter_type(one) for one in parameters.split(",")] for symbol, parameters in entries}


def _parameter_type(parameter: str) -> type:
    if "*" in parameter:
        return ctypes.c_void_p
    return _VALUES.get(parameter.strip().rpartition(" ")[0], ctypes.c_void_p)


class KernelCall(ctypes.Structure):
    """The struct of csrc/codec/kernel_call.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("kernel", "source", "target", "count")]


class RawDriver:
    """The driver at `path`, initialized, with the primary context of device 0 current on this thread."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name, parameters in declared_calls().items():
            function = getattr(self._library, name)
            function.restype = ctypes.c_int
            function.argtypes = parameters
        self._owned: list[tuple[str, int]] = []
        self._buffers: list[object] = []

    def call(self, name: str, *arguments: object) -> int:
        """Returns the entry point's result code."""
        return int(getattr(self._library, name)(*arguments))

    def ok(self, name: str, *arguments: object) -> None:
        """Calls the entry point and expects success."""
        code = self.call(name, *arguments)
        assert code == 0, f"{name} returned {self.error_name(code)} ({code})"

    def get(self, name: str, *arguments: object) -> int:
        """Calls an entry point whose first parameter is an output, expects success and returns the output."""
        value = ctypes.c_uint64(0)
        self.ok(name, ctypes.byref(value), *arguments)
        return value.value

    def error_name(self, code: int) -> str | None:
        name = ctypes.c_char_p()
        self.call("cuGetErrorName", code, ctypes.byref(name))
        return None if name.value is None else name.value.decode()

    def open(self) -> None:
        self.ok("cuInit", 0)
        self.ok("cuCtxPushCurrent_v2", self.get("cuDevicePrimaryCtxRetain", 0))

    def close(self) -> None:
        """Releases the remaining objects, newest first, and then the context."""
        for name, handle in reversed(self._owned):
            self.call(name, handle)
        self.call("cuCtxPopCurrent_v2", None)
        self.call("cuDevicePrimaryCtxRelease_v2", 0)

    def stream(self, flags: int = 1) -> int:
        return self._own("cuStreamDestroy_v2", self.get("cuStreamCreate", flags))

    def event(self, flags: int = 2) -> int:
        return self._own("cuEventDestroy_v2", self.get("cuEventCreate", flags))

    def recorded(self, stream: int | None) -> int:
        """A new event, recorded on `stream`."""
        event = self.event()
        self.ok("cuEventRecord", event, stream)
        return event

    def device_bytes(self, content: bytes) -> int:
        """A device allocation holding `content`, written from the host directly."""
        address = self._own("cuMemFree_v2", self.get("cuMemAlloc_v2", len(content)))
        ctypes.memmove(address, content, len(content))
        return address

    def host_bytes(self, content: bytes, *, pinned: bool = True) -> int:
        """Host memory holding `content`, registered unless `pinned` is false."""
        buffer = (ctypes.c_ubyte * len(content)).from_buffer_copy(content)
        self._buffers.append(buffer)
        address = ctypes.addressof(buffer)
        if pinned:
            self.ok("cuMemHostRegister_v2", address, len(content), 1)
            self._own("cuMemHostUnregister", address)
        return address

    def function(self, name: str) -> int:
        module = self._own("cuModuleUnload", self.get("cuModuleLoadData", b"any image"))
        return self.get("cuModuleGetFunction", module, name.encode())

    def launch(self, function: int, call: KernelCall, stream: int | None) -> int:
        params = (ctypes.c_void_p * 1)(ctypes.addressof(call))
        return self.call("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, stream, params, None)

    def _own(self, give_back: str, handle: int) -> int:
        self._owned.append((give_back, handle))
        return handle
