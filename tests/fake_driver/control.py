"""The fake driver's knobs and counters, for Python tests.

Loads the same library that a CudaDevice under test is given as its driver (`path`), so both see one state.
Knobs are no driver calls: they need no context, are not counted and do not block on a stream. fake_control.h
says what each does.
"""

from __future__ import annotations

import ctypes
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
    """A loaded fake driver. Two of one path share their state; a copy of the file has its own."""

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
        """Clears faults, a lost context, hold, delays, counters, logs and limits; live objects stay."""
        self._library.fake_reset()

    # When streams run.

    def set_delays(self, seed: int, max_microseconds: int) -> None:
        """Precedes every stream operation by a random pause of up to `max_microseconds`; 0 is none."""
        self._library.fake_set_delays(seed, max_microseconds)

    def hold_streams(self, held: bool = True) -> None:
        """While held, created streams run only what a blocking call needs: the latest legal schedule."""
        self._library.fake_hold_streams(int(held))

    # What goes wrong.

    def fail_nth(self, nth: int, code: int) -> None:
        """The nth driver call from now (1 is the next) returns `code` and does nothing."""
        self._library.fake_fail_nth(_from_one(nth), code)

    def fail_call(self, name: str, nth: int, code: int) -> None:
        """The same, counting only calls of one entry point; its "_v2" may be left out."""
        if not self._library.fake_fail_call(name.encode(), _from_one(nth), code):
            raise ValueError(f"the driver has no entry point {name!r}")

    def fail_async(self, nth: int, code: int) -> None:
        """The nth copy, kernel or memset to run from now does not, and the context is lost with `code`."""
        self._library.fake_fail_async(_from_one(nth), code)

    @property
    def faults_pending(self) -> int:
        """Faults armed and not yet fired."""
        return int(self._library.fake_faults_pending())

    # What the device has.

    def set_device_count(self, count: int) -> None:
        """0 to 8 devices, all alike."""
        self._library.fake_set_device_count(count)

    def set_device_capacity(self, size_bytes: int) -> None:
        """cuMemAlloc refuses to go beyond this; also what the device says it has."""
        self._library.fake_set_device_capacity(size_bytes)

    def set_host_capacity(self, size_bytes: int) -> None:
        """cuMemHostRegister refuses to go beyond this."""
        self._library.fake_set_host_capacity(size_bytes)

    # What happened.

    def live(self, kind: str) -> int:
        """How much of one of LIVE_KINDS is alive."""
        count = int(self._library.fake_live(kind.encode()))
        if count < 0:
            raise ValueError(f"nothing is counted as {kind!r}; expected one of {', '.join(LIVE_KINDS)}")
        return count

    def leaks(self) -> dict[str, int]:
        """The kinds of which something is alive, and how much; {} when all was given back."""
        return {kind: count for kind in LIVE_KINDS if (count := self.live(kind))}

    @property
    def blocking_streams(self) -> int:
        """Streams created since the last reset that synchronise with the legacy default stream."""
        return int(self._library.fake_blocking_streams())

    @property
    def call_count(self) -> int:
        """Driver calls since the last reset, refused ones included."""
        return int(self._library.fake_calls())

    def calls(self) -> list[str]:
        """The names of those calls, in order (the first million)."""
        return [self._library.fake_call_name(index).decode() for index in range(self.call_count)]

    def issues(self) -> list[str]:
        """What was put on streams since the last reset, as "wait s1 e3v2"; s0 is the legacy stream."""
        return [self._library.fake_issue(index).decode() for index in range(self._library.fake_issue_count())]


def _from_one(nth: int) -> int:
    if nth < 1:
        raise ValueError(f"nth counts from 1, the next one; got {nth}")
    return nth
