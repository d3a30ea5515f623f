"""Copies gradients between the host and the devices on which they are made and used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import torch

from vdnn.runtime.storage.transport import Transport
from vdnn.runtime.training_state.host_tensor import HostTensor
from vdnn.runtime.training_state.state_copies import StateCopies, StateCopy

Change = Callable[[list[torch.Tensor]], object]  # made to gradients in place


class GradientOnHost(NamedTuple):
    """A gradient that is away, and the changes that are made to it when it is next on the device."""

    host: HostTensor
    changes: tuple[Change, ...]


class GradientCopies:
    """The copies of one optimizer's gradients, on all devices."""

    def __init__(self) -> None:
        self._copies: dict[torch.device, StateCopies] = {}
        self.to_host_bytes = 0
        self.to_device_bytes = 0
        self.waited_ns = 0  # by the compute stream

    def open(self, device: torch.device, transport_for: Callable[[torch.device], Transport | None]) -> bool:
        """False if the session has no copies for `device`."""
        if device not in self._copies:
            transport = transport_for(device)
            if transport is None:
                return False
            self._copies[device] = StateCopies(transport)
        return True

    def close(self) -> None:
        self._copies = {}

    def opened(self) -> Collection[StateCopies]:
        return self._copies.values()

    def of(self, device: torch.device) -> StateCopies | None:
        return self._copies.get(device)

    def slice_bytes(self, device: torch.device) -> int:
        """The most bytes that come to the device together: two slices are there at one time."""
        return max(1, self._copies[device].window_bytes // 2)

    def fetch(self, device: torch.device, hosts: list[HostTensor]) -> StateCopy:
        """Issues copies to the device, which may be used after `arrive`."""
        copies = self._copies[device]
        copies.order_behind_uses(hosts)
        return copies.fetch(hosts)

    def arrive(self, moving: StateCopy, noted: Iterable[tuple[Change, ...]]) -> None:
        """Makes the device wait for the copies, and makes to each the changes that are noted."""
        self._copies[moving.tensors[0].device].arrive(moving)
        pairs = zip(noted, moving.tensors, strict=True)
        for changes, alike in itertools.groupby(pairs, lambda pair: pair[0]):
            gradients = [gradient for _, gradient in alike]
            for change in changes:
                change(gradients)

    def drop(self, moving: StateCopy) -> None:
        """Releases copies that were only read."""
        self._copies[moving.tensors[0].device].drop(moving, "gradients that are clipped")

    def abandon(self, moving: StateCopy) -> None:
        """Releases copies that were not used."""
        self._copies[moving.tensors[0].device].abandon(moving)

    def release_what_left(self, *, only_if_over: bool) -> None:
        for copies in self._copies.values():
            copies.release_what_left(only_if_over=only_if_over)

    def finish(self) -> None:
        """Blocks until everything that leaves is on the host."""
        for copies in self._copies.values():
            self.waited_ns += copies.finish()
            self.to_host_bytes, copies.to_host_bytes = self.to_host_bytes + copies.to_host_bytes, 0
            self.to_device_bytes, copies.to_device_bytes = self.to_device_bytes + copies.to_device_bytes, 0
