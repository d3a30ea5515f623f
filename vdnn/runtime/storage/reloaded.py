"""A reloaded copy: memory from torch's allocator on the current stream, and the copy to the device that fills it.

The memory has the alignment of the original. A copy serves the stream that it was made for: its memory returns to that
stream when it is released.
"""

from __future__ import annotations

import torch

from vdnn import _C
from vdnn.runtime.storage.facts import StorageFacts
from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.torch_internals.spans import in_span


class Reloaded:
    """One reloaded copy, issued when this is made. Does not block.

    `tensor` owns the memory; the bytes begin at offset `begin` in it, which is at `address`. `is_whole`: `tensor` has
    the geometry of the saved tensor, so that a use returns it as it is. `unused_views`: the number of views that have
    not been used since the reload.

    [Note: A reload leaves the window once] Its bytes are in the window until a use has waited for it, or until it is
    dropped unused. It counts them itself, because its owner may end on one thread while another thread, which found
    the owner through a weak reference, releases the reload: both would subtract them.
    """

    __slots__ = (
        "_in_window",
        "_transport",
        "address",
        "begin",
        "copy",
        "is_waited_for",
        "is_whole",
        "stream",
        "tensor",
        "unused_views",
    )

    def __init__(
        self, transport: Transport, copy: _C.HostCopy, facts: StorageFacts, stream: _C.Stream, views: int
    ) -> None:
        self._in_window = 0  # bytes
        self._transport = transport
        self.stream = stream
        self.unused_views = views
        self.is_waited_for = False  # a use has made `stream` wait for the copy
        self._allocate(transport, facts)
        self.copy = in_span("reload", transport.queue.reload)(copy, self.address, stream, self.tensor)
        self._in_window = facts.nbytes
        transport.reload_in_flight_bytes += facts.nbytes

    @classmethod
    def issued(
        cls,
        transport: Transport,
        stream: _C.Stream,
        tensor: torch.Tensor,
        copy: _C.Reload,
        *,
        is_whole: bool,
        is_waited_for: bool,
        unused_views: int,
    ) -> Reloaded:
        """A reload that the native gate has issued, into a tensor with all bytes of the storage."""
        reloaded = cls.__new__(cls)
        reloaded._in_window = 0
        reloaded._transport, reloaded.stream, reloaded.tensor, reloaded.copy = transport, stream, tensor, copy
        reloaded.address, reloaded.begin, reloaded.is_whole = tensor.data_ptr(), 0, is_whole
        reloaded.is_waited_for, reloaded.unused_views = is_waited_for, unused_views
        if not is_waited_for:
            reloaded._in_window = copy.bytes
            transport.reload_in_flight_bytes += copy.bytes
        return reloaded

    def _allocate(self, transport: Transport, facts: StorageFacts) -> None:
        alignment = transport.alignment
        misalignment = facts.address % alignment
        if facts.is_dense and not misalignment:
            dtype, size, stride = facts.geometry
            self.tensor = torch.empty_strided(size, stride, dtype=dtype, device=transport.torch_device)
            self.address = self.tensor.data_ptr()
            if not self.address % alignment:
                self.begin, self.is_whole = 0, True
                return
        # torch's allocators align to this or more, so this is usually enough. Another allocator may need padding.
        tensor = _allocate_bytes(transport, facts.nbytes + misalignment)
        if not transport.fake and tensor.data_ptr() % alignment:
            tensor = _allocate_bytes(transport, facts.nbytes + alignment)
        address = transport.address_of(tensor.untyped_storage())
        self.tensor, self.begin, self.is_whole = tensor, (misalignment - address) % alignment, False
        self.address = address + self.begin

    def wait(self) -> None:
        """Makes the stream wait for the copy. Does not block."""
        transport = self._transport
        in_span("wait for reload", transport.queue.wait)(self.copy, self.stream)
        self.is_waited_for = True
        transport.reload_in_flight_bytes -= self._in_window
        self._in_window = 0

    def __del__(self) -> None:
        # The queue holds the target of a copy that nothing waited for, and finishes it at the next hook.
        if self._in_window:
            self._transport.reload_in_flight_bytes -= self._in_window


def _allocate_bytes(transport: Transport, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=transport.torch_device)
