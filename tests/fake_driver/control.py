"""Controls and counters of the fake driver, for Python tests.

Loads the same library that a CudaDevice under test uses as its driver (`path`), so both see one state. Controls are not
driver calls: they need no context, are not counted and do not block on a stream. fake_control.h documents each.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[2] / "build" / "testing" / "libvdnn_fake_driver.so"
LIVE_KINDS = ("context", "stream", "event", "module", "device_bytes", "host_bytes", "pinned_ranges")

_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "fake_set_delays": (None, [ctypes.c_uint64, ctypes.c_uint64]),
    "fake_hold_streams": (None, [ctypes.c_int]),
    "fake_fail_nth": (None, [ctypes.c_uint64, ctypes.c_int]),
    "fake_fail_call": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int]),
    "fake_fail_async": (None, [ctypes.c_uint64, ctypes.c_int]),
    "fake_faults_pending": (ctypes.c_uint64, []),
    "fake_set_device_count": (None, [ctypes.c_int]),
    "fake_set_device_capacity": (None, [ctypes.c_uint64]),
    "fake_set_host_capacity": (None, [ctypes.c_uint64]),
    "fake_reset": (None, []),
    "fake_live": (ctypes.c_int64, [ctypes.c_char_p]),
    "fake_blocking_streams": (ctypes.c_uint64, []),
    "fake_calls": (ctypes.c_uint64, []),
    "fake_call_name": (ctypes.c_char_p, [ctypes.c_uint64]),
    "fake_issue_count": (ctypes.c_uint64, []),
    "fake_issue": (ctypes.c_char_p, [ctypes.c_uint64]),
}


class FakeDriver:
    """A loaded fake driver. Two objects with the same path share its state; a copy of the file has its own."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = LIBRARY if path is None else path
        if not self.path.exists():
            raise FileNotFoundError(f"the fake driver is not built: {self.path} is missing. Run `make build`.")
        self._library = ctypes.CDLL(str(self.path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype = result
            function.argtypes = arguments

    def reset(self) -> None:
        """Clears faults, a lost context, hold, delays, counters, logs and limits. Live objects stay alive."""
        self._library.fake_reset()

    # Timing of streams.

    def set_delays(self, seed: int, max_microseconds: int) -> None:
        """Puts a random pause of up to `max_microseconds` before every stream operation; 0 turns pauses off."""
        self._library.fake_set_delays(seed, max_microseconds)

    def hold_streams(self, held: bool = True) -> None:
        """While held, created streams run only as far as a blocking call needs: the latest legal schedule."""
        self._library.fake_hold_streams(int(held))

    # Faults.

    def fail_nth(self, nth: int, code: int) -> None:
        """Makes the nth driver call from now (1 is the next) return `code` and do nothing."""
        self._library.fake_fail_nth(_from_one(nth), code)

    def fail_call(self, name: str, nth: int, code: int) -> None:
        """Like fail_nth, but counts only calls of one entry point, whose "_v2" may be omitted."""
        if not self._library.fake_fail_call(name.encode(), _from_one(nth), code):
            raise ValueError(f"the driver has no entry point {name!r}")

    def fail_async(self, nth: int, code: int) -> None:
        """Makes the nth copy, kernel or memset to run from now fail, and lose the context with `code`."""
        self._library.fake_fail_async(_from_one(nth), code)

    @property
    def faults_pending(self) -> int:
        """Faults that are armed and have not fired."""
        return int(self._library.fake_faults_pending())

    # Properties of the devices.

    def set_device_count(self, count: int) -> None:
        """Sets the number of identical devices, 0 to 8."""
        self._library.fake_set_device_count(count)

    def set_device_capacity(self, size_bytes: int) -> None:
        """Sets the limit of cuMemAlloc, which is also the capacity that the device reports."""
        self._library.fake_set_device_capacity(size_bytes)

    def set_host_capacity(self, size_bytes: int) -> None:
        """Sets the limit of cuMemHostRegister."""
        self._library.fake_set_host_capacity(size_bytes)

    # Counters and logs.

    def live(self, kind: str) -> int:
        """The number of live objects of one of LIVE_KINDS."""
        count = int(self._library.fake_live(kind.encode()))
        if count < 0:
            raise ValueError(f"nothing is counted as {kind!r}; expected one of {', '.join(LIVE_KINDS)}")
        return count

    def leaks(self) -> dict[str, int]:
        """The kinds with live objects, and how many; {} if everything was released."""
        return {kind: count for kind in LIVE_KINDS if (count := self.live(kind))}

    @property
    def blocking_streams(self) -> int:
        """Streams created since the last reset that synchronise with the legacy default stream."""
        return int(self._library.fake_blocking_streams())

    def calls_in(self, drop: Callable[[], object]) -> int:
        """The number of driver calls while the native function `drop` runs. Python runs nothing of its own in between,
        in particular not what it was asked to call back."""
        count = functools.partial(self._library.fake_calls)
        before, _, after = list(map(functools.partial.__call__, (count, functools.partial(drop), count)))
        return int(after) - int(before)

    @property
    def call_count(self) -> int:
        """Driver calls since the last reset, refused ones included."""
        return int(self._library.fake_calls())

    def calls(self) -> list[str]:
        """The names of those calls, in order (the first million)."""
        return [self._library.fake_call_name(index).decode() for index in range(self.call_count)]

    def issues(self) -> list[str]:
        """Operations put on streams since the last reset, as "wait s1 e3v2"; s0 is the legacy stream."""
        return [self._library.fake_issue(index).decode() for index in range(self._library.fake_issue_count())]


def _from_one(nth: int) -> int:
    if nth < 1:
        raise ValueError(f"nth counts from 1, the next one; got {nth}")
    return nth
