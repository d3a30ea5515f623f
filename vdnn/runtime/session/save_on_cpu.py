"""vdnn.save_on_cpu: torch.autograd.graph.save_on_cpu with copies that overlap compute.

torch's version copies on the compute stream, which waits meanwhile. This one copies on streams of its own and reloads
ahead of use. All entries share one session for each device, so entering costs microseconds and memory is pinned once.
"""

from __future__ import annotations

import threading

from vdnn import _C
from vdnn.planning.catalogue import make_policy
from vdnn.runtime.machine.tensor_device import TensorDevice
from vdnn.runtime.session.engine import EngineOptions
from vdnn.runtime.session.offload import check_device
from vdnn.runtime.session.session import Session
from vdnn.runtime.storage.transport import TransportOptions

# Copying a smaller tensor costs more than the memory is worth.
_MIN_BYTES = 4096
_OPTIONS = TransportOptions()

_Device = str | _C.Device | TensorDevice
_sessions: dict[_Device | None, Session] = {}
_lock = threading.Lock()


def save_on_cpu(
    pin_memory: bool = True, device_type: str = "cuda", *, device: str | _C.Device | TensorDevice | None = None
) -> Session:
    """A context manager that offloads the tensors saved by the forward pass until the backward pass needs them.

        with vdnn.save_on_cpu():
            loss = model(x).sum()
        loss.backward()

    Replaces torch's context manager of that name, with these differences:

    * Parameters and buffers stay on the device, and so do tensors below 4 KiB.
    * All saves and views of a storage share one copy and keep their strides.
    * In-place writes to saved tensors are detected, as without hooks.
    * A tensor is released when its copy is complete and the next ones need the window, 256 MiB.
    * `pin_memory` has no effect. The memory is always pinned, since a copy to pageable memory waits for the device.

    It may be entered inside a session of vdnn.offload, and the reverse: as with all saved-tensor hooks, the innermost
    wins. Tensors on the CPU pass through. Returns a session that all calls on all threads share; its report() lists
    what was moved. It lives until the process ends or its device is closed. `device`, for use without a GPU, is "sim",
    a native device or a VirtualMachine, as in vdnn.offload.
    """
    if device_type != "cuda":
        raise ValueError(
            f"device_type: expected 'cuda', got {device_type!r}. Use torch.autograd.graph.save_on_cpu for that device."
        )
    check_device(device)
    key = None if device == "cuda" else device
    with _lock:
        for closed in [each for each in _sessions if _is_closed(each)]:
            del _sessions[closed]
        if key not in _sessions:
            _sessions[key] = Session(EngineOptions(make_policy("vdnn-all"), key, _MIN_BYTES, _OPTIONS))
        return _sessions[key]


def _is_closed(device: _Device | None) -> bool:
    native = device.device if isinstance(device, TensorDevice) else device
    return isinstance(native, _C.Device) and native.closed
