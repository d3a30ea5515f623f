"""Counts where an optimizer's state is and how much of it the steps moved, for the report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vdnn.bytesize import format_bytes
from vdnn.runtime.training_state.state_copies import StateCopies

_SHOWN = 3


@dataclass(slots=True)
class MovedBytes:
    """The counts of one optimizer. The bytes that crossed the link are of all steps together."""

    on_cpu: bool = False  # where the steps run, under the session that manages the state now or did last
    steps: int = 0
    host_bytes: int = 0
    stayed_bytes: int = 0  # in the last step, because memory of the host or a copy was refused
    to_host_bytes: int = 0
    to_device_bytes: int = 0
    waited_ns: int = 0
    deferred: int = 0  # updates of a parameter that waited for its next use, of all steps
    overlapped_updates: int = 0  # the deferred ones that were made for a call of a module
    # Why parameters of the last step could not wait, and how many.
    undeferred_reasons: Counter[str] = field(default_factory=Counter)

    def finish(self, copies: StateCopies) -> None:
        """Waits until everything that leaves is on the host, and adds its counts."""
        self.waited_ns += copies.finish()
        self.to_host_bytes, copies.to_host_bytes = self.to_host_bytes + copies.to_host_bytes, 0
        self.to_device_bytes, copies.to_device_bytes = self.to_device_bytes + copies.to_device_bytes, 0

    def lines(self, name: str) -> list[str]:
        steps = max(1, self.steps)
        crossed_bytes = (self.to_host_bytes + self.to_device_bytes) // steps
        lines = [
            f"  optimizer state of {name}: {format_bytes(self.host_bytes)} on the host, {format_bytes(crossed_bytes)} "
            f"crossed the link per step, for which compute waited {self.waited_ns / steps / 1e6:.2f} ms"
        ]
        if self.on_cpu:
            lines.append("  it steps on the CPU: what crossed are gradients and parameters")
        if self.stayed_bytes:
            lines.append(
                f"  {format_bytes(self.stayed_bytes)} of it stay on the device, because memory of the host or a copy "
                "was refused"
            )
        if self.deferred or self.undeferred_reasons:
            lines.append(
                f"  deferred steps: {self.deferred} updates of a parameter waited for its next use, "
                f"{self.overlapped_updates} of them for a call of a module"
            )
        lines += [
            f"  {count} parameters were stepped at once in the last step: {why}"
            for why, count in self.undeferred_reasons.most_common(_SHOWN)
        ]
        return lines
