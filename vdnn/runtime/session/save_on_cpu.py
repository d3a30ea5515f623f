"""vdnn.save_on_cpu: torch.autograd.graph.save_on_cpu with copies that overlap.

Torch's copies on the stream that computes, which stands still meanwhile; this one copies on streams of its own, there
and back ahead of use. All entries share one session for each device, so that entering costs microseconds and pinned
memory is taken from the system once.
"""

from __future__ import annotations

import threading

from vdnn import _C
from vdnn.planning.catalogue import make_policy
from vdnn.runtime.machine.tensor_device import TensorDevice
from vdnn.runtime.session.offload import check_device
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.transport import TransportOptions

# Of less than this the way there and back costs more than it frees.
_MIN_BYTES = 4096
_OPTIONS = TransportOptions()

_Place = str | _C.Device | TensorDevice
_sessions: dict[_Place, Session] = {}
_opening = threading.Lock()


def save_on_cpu(
    pin_memory: bool = True, device_type: str = "cuda", *, device: str | _C.Device | TensorDevice | None = None
) -> Session:
    """A context manager under which tensors saved by the forward pass go to host memory until backward needs them.

        with vdnn.save_on_cpu():
            loss = model(x).sum()
        loss.backward()

    Takes the place of torch's, and differs in this: parameters and buffers stay, which are on the device anyway, and
    so do tensors below 4 KiB; all views and saves of a storage share one copy, and keep their strides; in-place writes
    to what was saved are found, as without hooks; a tensor leaves the device when its copy is done and the next ones
    need the window, 256 MiB. `pin_memory` has no effect: the memory is always pinned, since a copy to any other waits
    for the device.

    May be entered inside a session of vdnn.offload, and that one inside this: as with all saved-tensor hooks, the
    innermost wins. Tensors on the CPU pass through. Returns a session that all calls share, on any thread; its
    report() says what was moved. It lives as long as the process, or until its device is closed. `device`, for use
    without a GPU, is "sim", a native device or a VirtualMachine, as in vdnn.offload.
    """
    if device_type != "cuda":
        raise ValueError(
            f"device_type: expected 'cuda', got {device_type!r}: use torch.autograd.graph.save_on_cpu for that."
        )
    check_device(device)
    place = "cuda" if device is None else device
    with _opening:
        for closed in [one for one in _sessions if _is_closed(one)]:
            del _sessions[closed]
        if place not in _sessions:
            _sessions[place] = Session(make_policy("vdnn-all"), place, _MIN_BYTES, _OPTIONS, nests=True)
        return _sessions[place]


def _is_closed(place: _Place) -> bool:
    native = place.device if isinstance(place, TensorDevice) else place
    return isinstance(native, _C.Device) and native.closed
