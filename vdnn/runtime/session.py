"""vdnn.offload: the context manager around a training loop, and the session it yields.

Entering installs the hooks on this thread; leaving removes them. What was saved inside may be used outside, at any time
later: packed objects carry all they need. A session may be entered again; while one is active on a thread, another one
is refused there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch

from vdnn import _C
from vdnn.bytesize import format_bytes, parse_bytes
from vdnn.errors import VdnnError
from vdnn.planning.policies import OnlinePolicy, make_policy
from vdnn.runtime.counters import Counters, Kept
from vdnn.runtime.module_watch import ModuleWatch
from vdnn.runtime.packer import Packer
from vdnn.runtime.storage_table import StorageSet
from vdnn.runtime.transport import Transport, TransportOptions

logger = logging.getLogger("vdnn")

_active = threading.local()
_marked_storages = StorageSet()
_marked_modules: list[Any] = []


class Session(contextlib.ContextDecorator):
    """What runs inside `with vdnn.offload(...)`. Also works as a decorator."""

    def __init__(self, policy: OnlinePolicy, device: str | _C.Device | None, min_bytes: int, options: TransportOptions):
        self.policy = policy
        self.counters = Counters()
        self._device = device
        self._options = options
        self._transports: dict[torch.device, Transport | None] = {}
        self._modules = ModuleWatch()
        self._packer = Packer(policy, min_bytes, self.counters, self._modules, _marked_storages, self._transport_for)
        self._entered: list[contextlib.ExitStack] = []
        self._has_warned = False

    # Life.

    def __enter__(self) -> Session:
        if getattr(_active, "session", None) not in (None, self):
            raise VdnnError("a vdnn session is active on this thread already: leave it before entering another one.")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise VdnnError("vdnn.offload cannot be entered while a CUDA graph is being captured: capture without it.")
        stack = contextlib.ExitStack()
        if not self._entered:
            self._modules.marked.update(_marked())
            stack.enter_context(self._modules)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._packer.pack, self._packer.unpack))
        self._entered.append(stack)
        _active.session = self
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered.pop().__exit__(None, None, None)
        if not self._entered:
            _active.session = None
            self._say_if_nothing_was_offloaded()

    def close(self) -> None:
        """Waits for all copies and gives host memory and streams back. Graphs saved inside can no longer run backward
        unless their storages are still on the device. Dropping a session does the same, later."""
        while self._transports:
            _, transport = self._transports.popitem()
            if transport is not None:
                transport.close()

    # Devices.

    def _transport_for(self, device: torch.device) -> Transport | None:
        try:
            return self._transports[device]
        except KeyError:
            return self._transports.setdefault(device, self._open_transport(device))

    def _open_transport(self, device: torch.device) -> Transport | None:
        if device.type == "cuda" and self._device in (None, "cuda"):
            return Transport(device, _C.CudaDevice(device.index or 0), self._options)
        if device.type == "cpu" and self._device == "sim":
            return Transport(device, _C.SimDevice(), self._options)
        if device.type == "cpu" and isinstance(self._device, _C.Device):
            return Transport(device, self._device, self._options)
        if device.type == "cpu":
            logger.warning(
                "vdnn: tensors on the CPU are passed through. Move the model to a GPU, or use "
                "vdnn.offload(device='sim') to try it on the CPU."
            )
        return None

    # Reports.

    def report(self) -> str:
        """What was saved, moved and kept, and why, as text."""
        counters = self.counters
        lines = [
            f"policy {self.policy.name}: {counters.saves} saves of {format_bytes(counters.saved_bytes)}",
            f"  offloaded {counters.storages} storages, {format_bytes(counters.storage_bytes)}"
            f" (and {counters.shared_saves} saves that share them)",
            f"  freed {format_bytes(counters.freed_bytes)}; copied but not freed, because somebody else holds it: "
            f"{format_bytes(counters.copied_not_freed_bytes)}",
            f"  {counters.uses} uses: {counters.used_in_place} still on the device, {counters.prefetched_reloads} "
            f"reloaded ahead, {counters.demand_reloads} on demand; {format_bytes(counters.reloaded_bytes)} back",
        ]
        lines += [
            f"  kept {count} saves, {format_bytes(counters.kept_bytes[reason])}: {reason.value}"
            for reason, count in counters.kept.most_common()
        ]
        return "\n".join(lines)

    def _say_if_nothing_was_offloaded(self) -> None:
        counters = self.counters
        if self._has_warned:
            return
        if counters.saves and not counters.storages and self.policy.name != "keep":
            self._has_warned = True
            reasons = ", ".join(f"{count} x {reason.value}" for reason, count in counters.kept.most_common(3))
            logger.warning("vdnn: nothing was offloaded, of %d saves (%s).", counters.saves, reasons or "none eligible")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._packer.pause(True)
        try:
            yield
        finally:
            self._packer.pause(False)


def offload(
    policy: str | OnlinePolicy = "vdnn-all",
    *,
    device: str | _C.Device | None = None,
    min_bytes: int | str = "1MiB",
    host_budget: int | str | None = None,
    offload_window: int | str = "256MiB",
    reload_window: int | str = "256MiB",
) -> Session:
    """A session that offloads what autograd saves inside `with`.

    `policy` is one of vdnn.planning.policies. `device` is "cuda", "sim" (tensors on the CPU, on a simulated device), a
    native device to stand for the CPU's tensors, or None for whatever GPU the tensors are on. Saves smaller than
    `min_bytes` stay. `host_budget` caps pinned memory; the windows cap what copies in flight hold on the device.

        with vdnn.offload("vdnn-all") as session:
            model(x).sum().backward()
        print(session.report())
    """
    if isinstance(device, str) and device not in ("cuda", "sim"):
        raise ValueError(f"device: expected 'cuda', 'sim' or a device of the native core, got {device!r}.")
    options = TransportOptions(
        0 if host_budget is None else parse_bytes(host_budget), parse_bytes(offload_window), parse_bytes(reload_window)
    )
    return Session(make_policy(policy), device, parse_bytes(min_bytes) if min_bytes else 0, options)


def keep(what: torch.Tensor | torch.nn.Module) -> Any:
    """Marks a tensor's storage, or whatever is saved inside a module's forward, to stay on the device. Returns it."""
    if isinstance(what, torch.nn.Module):
        import weakref

        _marked_modules.append(weakref.ref(what))
        session = getattr(_active, "session", None)
        if session is not None:
            session._modules.marked.add(what)
    elif isinstance(what, torch.Tensor):
        _marked_storages.add(what.untyped_storage())
    else:
        raise TypeError(f"keep: expected a tensor or a module, got {type(what).__name__}.")
    return what


def _marked() -> list[torch.nn.Module]:
    return [module for reference in _marked_modules if (module := reference()) is not None]


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside, saves on this thread stay on the device. Without a session it does nothing."""
    session: Session | None = getattr(_active, "session", None)
    if session is None:
        yield
        return
    with session.paused():
        yield


__all__ = ["Counters", "Kept", "Session", "keep", "offload", "paused"]
