"""One rank of a training on several cards: its shards, the memory of its collectives, and the time it waits for them.

[Note: A rank] Units are the groups of FSDP2, and all that is not in a repeated block is its root group. Each parameter
is cut along its first dimension, padded to a multiple of the ranks. While a block runs, its own parameters and those of
the next are whole; in backward also its gradients, and once more as input of the reduction. The root group is whole
from the first forward to the end of backward, with its gradients. DDP cuts nothing and holds each gradient twice.
Collectives are rings: each card sends (N-1)/N of the whole to gather or reduce it, and twice that to do both. They run
one after another, one block ahead of computing, and do not slow copies to the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from vdnn.errors import InvalidArgumentError
from vdnn.hardware import HardwareProfile
from vdnn.planning.training.training import Training
from vdnn.report.training_report import RankShare
from vdnn.runtime.rehearsal.measured_units import UnitParameter
from vdnn.runtime.rehearsal.rehearsed_training import RehearsedTraining


class Shard(Enum):
    """The classes that are cut: with FSDP2 parameters, gradients and optimizer state; with DDP nothing."""

    FSDP2 = "fsdp2"
    DDP = "ddp"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The number of cards, each of which sends `bytes_per_s` to the others while it receives as much."""

    count: int
    shard: Shard
    bytes_per_s: int

    def collective_ns(self, nbytes: int) -> int:
        """The time of a ring that gathers or reduces `nbytes`."""
        return round(nbytes * (self.count - 1) / self.count / self.bytes_per_s * 1e9)


def ranks_of(profile: HardwareProfile, ranks: int | None, shard: str | None) -> Ranks | None:
    """Checks what a user gave. Cards without a link of their own reach each other through that to the host."""
    if ranks is None:
        if shard is not None:
            raise ValueError(f"shard: expected ranks beside it, because one card has nothing to share, got {shard!r}.")
        return None
    if type(ranks) is not int or ranks < 2:
        raise InvalidArgumentError(argument="ranks", expected="a number of cards, 2 or more", got=repr(ranks))
    names = [one.value for one in Shard]
    if shard is not None and shard not in names:
        raise InvalidArgumentError(argument="shard", expected=f"one of {', '.join(names)}", got=repr(shard))
    through_host = profile.duplex_bytes_per_s // 2
    return Ranks(ranks, Shard(shard or "fsdp2"), profile.cards.get("bytes_per_s", through_host))


def on_one_rank(rehearsed: RehearsedTraining, ranks: Ranks) -> RehearsedTraining:
    """The training of the rank with the most bytes, which is the first. See [Note: A rank]."""
    held = _Held(rehearsed, ranks)
    training = _sharded(rehearsed.training, held) if ranks.shard is Shard.FSDP2 else _replicated(rehearsed.training)
    forward, backward = _waits(rehearsed.training, held)
    units = tuple(
        replace(unit, forward_ns=unit.forward_ns + before, backward_ns=unit.backward_ns + behind)
        for unit, before, behind in zip(training.units, forward, backward, strict=True)
    )
    passes = rehearsed.training.micro_batches
    gathered, reduced = held.gathered_bytes, sum(held.gradients)
    twice = 2 if ranks.shard is Shard.DDP else 1
    share = RankShare(
        ranks=ranks.count,
        shard=ranks.shard.value,
        bytes_per_s=ranks.bytes_per_s,
        gathered_bytes=passes * gathered,
        reduced_bytes=passes * reduced,
        collective_ns=passes * ranks.collective_ns(gathered + twice * reduced),
        waited_ns=passes * (sum(forward) + sum(backward)),
    )
    return replace(rehearsed, training=replace(training, units=units), rank=share)


class _Held:
    """The whole bytes of each unit's parameters and gradients, padded, and which units are groups of their own."""

    def __init__(self, rehearsed: RehearsedTraining, ranks: Ranks) -> None:
        self.ranks, self.parameters = ranks, rehearsed.parameters
        self.blocks = set(rehearsed.blocks)
        count = ranks.count if ranks.shard is Shard.FSDP2 else 1
        self.whole = [sum(count * shard_bytes(one, one.nbytes, count) for one in unit) for unit in self.parameters]
        self.gradients = [
            sum(count * shard_bytes(one, one.gradient_bytes, count) for one in unit) for unit in self.parameters
        ]
        others = [index for index in range(len(self.whole)) if index not in self.blocks]
        self.root_bytes = sum(self.whole[index] for index in others)
        self.root_gradient_bytes = sum(self.gradients[index] for index in others)

    @property
    def gathered_bytes(self) -> int:
        """In one pass: blocks twice, because they are dropped after forward, and the root group once."""
        if self.ranks.shard is Shard.DDP:
            return 0
        return 2 * sum(self.whole[index] for index in self.blocks) + self.root_bytes

    def next_block(self, index: int, step: int) -> int:
        """The whole bytes of the block that runs next, 0 behind the last."""
        following = range(index + 1, len(self.whole)) if step > 0 else range(index - 1, -1, -1)
        return next((self.whole[one] for one in following if one in self.blocks), 0)


def shard_bytes(parameter: UnitParameter, nbytes: int, ranks: int) -> int:
    """The part of one rank of what has the shape of a parameter: its rows are padded to a multiple of the ranks."""
    return nbytes if not parameter.rows else nbytes // parameter.rows * -(-parameter.rows // ranks)


def _sharded(training: Training, held: _Held) -> Training:
    ranks, units, fixed_bytes = held.ranks.count, [], training.fixed_bytes
    for index, (unit, parameters) in enumerate(zip(training.units, held.parameters, strict=True)):
        own = [one for one in parameters if not one.is_shared]
        fixed_bytes -= sum(one.nbytes - shard_bytes(one, one.nbytes, ranks) for one in parameters if one.is_shared)
        state = sum(shard_bytes(one, one.state_bytes, ranks) for one in parameters)
        gradient = sum(shard_bytes(one, one.gradient_bytes, ranks) for one in parameters)
        part = gradient / unit.gradient_bytes if unit.gradient_bytes else 0.0
        is_block = index in held.blocks
        first = 0 if index else held.root_gradient_bytes  # the root group is reduced at the end
        units.append(
            replace(
                unit,
                weight_bytes=sum(shard_bytes(one, one.nbytes, ranks) for one in own if one.gradient_bytes),
                frozen_bytes=sum(shard_bytes(one, one.nbytes, ranks) for one in own if not one.gradient_bytes),
                gradient_bytes=gradient,
                state_bytes=state,
                step_ns=round(unit.step_ns * part),
                host_step_bytes=round(unit.host_step_bytes * part),
                forward_transient_bytes=unit.forward_transient_bytes
                + held.root_bytes
                + held.next_block(index, 1)
                + (held.whole[index] if is_block else 0),
                backward_transient_bytes=unit.backward_transient_bytes
                + held.root_bytes
                + held.root_gradient_bytes
                + held.next_block(index, -1)
                + first
                + (held.whole[index] + 2 * held.gradients[index] if is_block else 0),
            )
        )
    return replace(training, units=tuple(units), fixed_bytes=max(0, fixed_bytes))


def _replicated(training: Training) -> Training:
    buckets = sum(unit.gradient_bytes for unit in training.units)
    return replace(training, fixed_bytes=training.fixed_bytes + buckets)


def _waits(training: Training, held: _Held) -> tuple[list[int], list[int]]:
    """The time that each unit's forward and backward wait for collectives. The time until the reductions end is part of
    the backward of the first unit."""
    is_ddp = held.ranks.shard is Shard.DDP
    forward, backward = [0] * len(training.units), [0] * len(training.units)
    link = 0 if is_ddp else held.ranks.collective_ns(held.root_bytes)
    root_ready = now = began = 0
    root_ready = link
    for index, unit in enumerate(training.units):
        link, ready = _gathered(held, index, link, began, root_ready)
        began = max(now, ready)
        forward[index], now = began - now, began + unit.forward_ns
    link, began = max(link, now), now
    for index in reversed(range(len(training.units))):
        link, ready = _gathered(held, index, link, began, 0)
        began = max(now, ready)
        backward[index], now = began - now, began + training.units[index].backward_ns
        if is_ddp or index in held.blocks:
            link = max(link, now) + held.ranks.collective_ns((2 if is_ddp else 1) * held.gradients[index])
    if not is_ddp:
        link = max(link, now) + held.ranks.collective_ns(held.root_gradient_bytes)
    backward[0] += max(0, link - now)
    return forward, backward


def _gathered(held: _Held, index: int, link: int, issued: int, ready: int) -> tuple[int, int]:
    """When the link is free again, and when the parameters are there. The gathering of a block begins when the unit
    before it begins."""
    if held.ranks.shard is Shard.DDP or index not in held.blocks:
        return link, ready
    done = max(link, issued) + held.ranks.collective_ns(held.whole[index])
    return done, max(done, ready)
