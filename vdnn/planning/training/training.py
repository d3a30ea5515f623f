"""Training: one step of a whole training as a cycle of units, and TrainingMachine: what it runs on. No torch.

A unit is a module whose bytes move together: a block of a decoder, its embedding, its head. The step runs the units
forward and backward for each micro-batch, and then their optimizer. Steps follow each other, so a copy that is issued
in one may end in the next.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from vdnn.errors import InvalidArgumentError
from vdnn.planning.costs import LinkCosts


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit. Bytes and times of activations are those of one micro-batch.

    `weight_bytes` are the trained parameters as the model computes with them, `frozen_bytes` those that no optimizer
    changes. `state_bytes` are all that the optimizer keeps, with master weights if it has them. `saved_bytes` are what
    forward saves for backward, of which a recompute needs `boundary_bytes`. A transient is memory in addition to all of
    these while the unit runs. `step_ns` is the optimizer's time on the device, and `host_step_bytes` are the bytes that
    a step on the CPU reads and writes in the host's memory. `step_reads_weights`: there are no master weights in the
    state. The host issues each of the three in its `issue_ns`; 0 if nothing is known of the host.
    """

    name: str
    weight_bytes: int
    frozen_bytes: int
    gradient_bytes: int
    state_bytes: int
    saved_bytes: int
    boundary_bytes: int
    forward_ns: int
    backward_ns: int
    forward_transient_bytes: int
    backward_transient_bytes: int
    step_ns: int
    host_step_bytes: int
    step_reads_weights: bool = False
    forward_issue_ns: int = 0
    backward_issue_ns: int = 0
    step_issue_ns: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "step_reads_weights"):
                continue
            if not isinstance(value, int) or value < 0:
                raise InvalidArgumentError(
                    argument=f"unit {self.name!r}, {field.name}", expected="0 or more", got=str(value)
                )
        if self.boundary_bytes > self.saved_bytes:
            raise InvalidArgumentError(
                argument=f"unit {self.name!r}, boundary_bytes",
                expected=f"at most the saved bytes, {self.saved_bytes}",
                got=str(self.boundary_bytes),
            )

    @property
    def parameter_bytes(self) -> int:
        return self.weight_bytes + self.frozen_bytes


@dataclass(frozen=True, slots=True)
class Training:
    """`clips`: the gradients are clipped by their norm, which is known only when backward has ended. `fixed_bytes` are
    always on the device."""

    name: str
    units: tuple[Unit, ...]
    micro_batches: int = 1
    clips: bool = True
    fixed_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.units:
            raise InvalidArgumentError(argument="units", expected="at least one unit", got="none")
        if self.micro_batches < 1:
            raise InvalidArgumentError(argument="micro_batches", expected="1 or more", got=str(self.micro_batches))

    @property
    def computing_ns(self) -> int:
        """The time of a step that waits for nothing and recomputes nothing."""
        one = sum(unit.forward_ns + unit.backward_ns for unit in self.units)
        return self.micro_batches * one + sum(unit.step_ns for unit in self.units if unit.gradient_bytes)

    @property
    def issue_ns(self) -> int:
        """The time in which the host issues such a step; 0 if nothing is known of it."""
        one = sum(unit.forward_issue_ns + unit.backward_issue_ns for unit in self.units)
        return self.micro_batches * one + sum(unit.step_issue_ns for unit in self.units if unit.gradient_bytes)

    def without_host(self) -> Training:
        """The same training on a host that takes no time."""
        if not self.issue_ns:
            return self
        none = {"forward_issue_ns": 0, "backward_issue_ns": 0, "step_issue_ns": 0}
        return replace(self, units=tuple(replace(unit, **none) for unit in self.units))  # type: ignore[arg-type]

    @property
    def kept_ns(self) -> int:
        """The step with everything on the device. See [Note: The host lane] in
        csrc/planning/step_timeline.h: the host runs ahead."""
        return max(self.computing_ns, self.issue_ns)


@dataclass(frozen=True, slots=True)
class TrainingMachine:
    """A card, its link, and its host. `host_bytes_per_s` is the rate of the host's memory, which copies and steps on
    the CPU share; `cpu_bytes_per_s` is how much of it the cores use when they step alone."""

    name: str
    link: LinkCosts
    host_bytes: int
    host_bytes_per_s: float
    cpu_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("host_bytes", "host_bytes_per_s", "cpu_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(argument=name, expected="more than 0", got=str(getattr(self, name)))
