"""Finds writes to copies of parameters on the device, whoever made them, and keeps them.

[Note: Who wrote] A copy on the device differs from the host copy if the version of the parameter, or that of the copy,
has changed, or if the program took `.data`. At the end of each use such a copy is written over the host copy. Writes
that torch does not count (DLPack, an address, a kernel of somebody's own) show in a hash of the bytes at both ends of a
use. The first uses of a parameter are checked so, and then all uses in one call of the model of every `one_in`, drawn
from a seed, for as long as the session lasts. A write is kept if every use before was checked, as in the first uses.
Otherwise it is refused, because uses before may have lost one.

Memory of the host that the program holds may be written to while a module runs with the copy on the device. Such a
write comes too late for the module, so it is refused. Between calls it is not, also if a graph or the program keeps the
copy on the device in place: the next use of that copy begins with the values of the host. A version that has changed
does not say which of the two memories was written to, so the copy on the device is hashed in each use for as long as
the program holds the other one.

[Note: Cost of checks] A checked use reads the copy twice on the device. The host waits for the result of each for as
long as all uses are checked, later once at the end of the call of the model.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import weakref
import zlib
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch

from vdnn.errors import DriverError
from vdnn.runtime.storage.integrity import HashPairs
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.tensor_kinds import outside_of_inference_mode
from vdnn.runtime.training_state.parameters.away_parameter import AwayParameter


class UnsafeWrite(Enum):
    """The consequence of a write."""

    UNSEEN = "it is written to while a module runs, in a way that torch does not count"  # and it was kept
    ON_HOST = "it is written to on the host while its copy on the device is in use"  # and that copy was not
    BOTH = "it is written to on the host and on the device while it is in use"


DEFAULT_ONE_IN = 64
_FIRST = 2  # uses of a parameter that are checked when it is new


class Use(NamedTuple):
    """A use of a parameter by a module."""

    away: AwayParameter
    module: str


class Writes:
    """The writes of one session. `one_in` 0: nothing is hashed."""

    def __init__(self, one_in: int = DEFAULT_ONE_IN) -> None:
        self._one_in = one_in
        self._random = random.Random(0)
        self._calls = 0
        self._next = self._one_of_window(0)
        self._is_checking = False
        self._is_compared = False  # hashes wait for the end of a call
        self._pairs: weakref.WeakKeyDictionary[Transport, HashPairs[Use]] = weakref.WeakKeyDictionary()
        self.kept: dict[str, int] = {}  # how often writes to a parameter were kept, by name

    @property
    def compared(self) -> int:
        return sum(pairs.compared for pairs in self._pairs.values())

    # Calls of the model.

    def call_begins(self) -> None:
        if not self._one_in:
            return
        self._is_checking = self._calls == self._next
        self._calls += 1
        if self._calls % self._one_in == 0:
            self._next = self._one_of_window(self._calls)

    def call_ends(self) -> list[Use]:
        """The uses up to the end of this call in which a parameter was written to in a way that torch does not count,
        where earlier uses were not checked. Blocks if any was checked."""
        self._is_checking = False
        if not self._is_compared:
            return []
        self._is_compared = False
        return [use for pairs in list(self._pairs.values()) for use in pairs.differing()[1]]

    def _one_of_window(self, begin: int) -> int:
        return begin + self._random.randrange(self._one_in) if self._one_in else -1

    # One use.

    def use_begins(self, away: AwayParameter) -> None:
        """The copy on the device was put in place."""
        transport = away.copies.transport
        away.hash_before = away.host_hash = None
        if transport.fake or away.on_device is None:
            return
        is_checked = bool(self._one_in) and (away.checks < _FIRST or self._is_checking)
        is_held = away.is_held_on_host()
        if is_checked and is_held:
            away.host_hash = _hash_of(away.host.tensor)
        if transport.has_kernels and (is_checked or is_held):
            with contextlib.suppress(DriverError, torch.OutOfMemoryError):  # this use is not checked
                address = away.on_device.addresses[0]
                away.hash_before = self._of(transport).hash(address, away.nbytes, transport.current_stream())
        away.all_checked &= away.hash_before is not None

    def use_ends(self, away: AwayParameter, module: Callable[[], str]) -> UnsafeWrite | None:
        """Keeps the writes to the copy on the device, after its holders have released it."""
        moving = away.on_device
        if moving is None:
            return None
        before, away.hash_before = away.hash_before, None
        host_hash, away.host_hash = away.host_hash, None
        is_counted = away.is_in_place and away.parameter._version != away.version
        is_exposed = away.is_in_place and (away.is_exposed or away.is_copied_out)
        is_changed = is_exposed or away.copy_version != moving.tensors[0]._version
        is_counted_on_host = is_counted and not is_changed and before is not None and away.is_held_on_host()
        is_on_host = is_counted_on_host and not self._differs(away, before) and not _are_equal(away)
        if is_on_host:
            return UnsafeWrite.ON_HOST
        if host_hash is not None and host_hash != _hash_of(away.host.tensor):
            is_changed = is_changed or before is None or self._differs(away, before)
            return UnsafeWrite.BOTH if is_changed else UnsafeWrite.ON_HOST
        if is_counted or is_changed:
            self._write_back(away)
            self.kept[away.name] = self.kept.get(away.name, 0) + 1
            return None
        if before is None or not away.is_in_place:
            return None
        return self._checked(away, before, module)

    @staticmethod
    def is_written_to(away: AwayParameter) -> bool:
        """True if torch has counted a write since the use began, or could not count one, and the copies differ now."""
        moving = away.on_device
        if moving is None or not away.is_in_place:
            return False
        is_counted = away.parameter._version != away.version or away.copy_version != moving.tensors[0]._version
        return (is_counted or away.is_exposed) and not _are_equal(away)

    def take_home(self, away: AwayParameter) -> None:
        """The parameter no longer stays on the device. Optimizers have stepped it there, in ways that torch does not
        count: the host gets the values that it has now. Mapped memory belongs to frozen parameters, whose writes
        count."""
        if away.is_in_place and not away.is_mapped:
            self._write_back(away)
            away.is_exposed = bool(away.users)  # what uses it now may be such a step
            away.hash_before = away.host_hash = None

    @staticmethod
    def renew(away: AwayParameter) -> None:
        """Writes the host copy over the copy on the device, which is in place and which nothing uses now. Blocks."""
        moving = away.on_device
        if moving is None:
            return
        with outside_of_inference_mode(), torch.no_grad():
            moving.tensors[0].copy_(away.host.tensor)
        away.version, away.copy_version = away.parameter._version, moving.tensors[0]._version

    @staticmethod
    def _write_back(away: AwayParameter) -> None:
        """Writes the copy on the device over that on the host. Blocks, because the program may read it next."""
        moving, copies = away.on_device, away.copies
        if moving is None:
            return
        if away.is_mapped:
            away.host.tensor.copy_(moving.tensors[0])
        else:
            copies.settle(copies.mirror([moving.tensors[0]], [away.host]))
        away.version, away.copy_version = away.parameter._version, moving.tensors[0]._version

    def _checked(self, away: AwayParameter, before: torch.Tensor, module: Callable[[], str]) -> UnsafeWrite | None:
        away.checks += 1
        if away.all_checked:
            return UnsafeWrite.UNSEEN if self._differs(away, before) else None
        transport, moving = away.copies.transport, away.on_device
        if moving is not None:
            with contextlib.suppress(DriverError, torch.OutOfMemoryError):
                stream, address = transport.current_stream(), moving.addresses[0]
                self._of(transport).compare(Use(away, module()), before, address, away.nbytes, stream)
                self._is_compared = True
        return None

    def _differs(self, away: AwayParameter, before: torch.Tensor | None) -> bool:
        """True if the copy on the device was written to since `before`. Blocks. False if it cannot be said."""
        transport, moving = away.copies.transport, away.on_device
        if moving is None or before is None:
            return False
        with contextlib.suppress(DriverError, torch.OutOfMemoryError), torch.no_grad():
            after = self._of(transport).hash(moving.addresses[0], away.nbytes, transport.current_stream())
            return bool((before != after).item())
        return False

    def _of(self, transport: Transport) -> HashPairs[Use]:
        pairs = self._pairs.get(transport)
        if pairs is None:
            pairs = self._pairs[transport] = HashPairs(transport)
        return pairs


def _are_equal(away: AwayParameter) -> bool:
    """True if both copies have the same bytes: an operation may count as a write that changes nothing. Blocks."""
    if away.on_device is None:
        return True
    host, copy = away.host.tensor, away.on_device.tensors[0].cpu()
    return torch.equal(host.contiguous().view(torch.uint8), copy.contiguous().view(torch.uint8))


def _hash_of(host: torch.Tensor) -> int:
    nbytes = host.untyped_storage().nbytes()
    return zlib.crc32((ctypes.c_char * nbytes).from_address(host.untyped_storage().data_ptr()))
