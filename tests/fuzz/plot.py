"""Draws a program from its seed: a plot (which networks train, in which order), operations, and disturbances."""

from __future__ import annotations

from random import Random

from tests.fuzz import productions
from tests.fuzz.grammar import PRODUCTIONS, Production
from tests.fuzz.program import ALWAYS, INPUT, Program, Statement, When
from tests.fuzz.sessions import settles
from tests.fuzz.training import draw_kind

# Each plan is searched for, so such a program takes several times as long as another one.
MODES = {
    "vdnn-all": 0.38,
    "recompute-all": 0.5,
    "drawn": 0.09,
    "auto 45": 0.0075,
    "auto 60": 0.0075,
    "auto 80": 0.0075,
    "auto min": 0.0075,
    "guarded 50": 0.02,
    "guarded 80": 0.02,
    "stored 55": 0.01,
    "stored 85": 0.01,
}
MOST_OPERATIONS = 10
_MUCH_LATER = 3  # times: what changes late does so once steps have settled
_ONE_IN = 16  # this share of programs runs a custom function's backward before the backward of another reader

_OPERATIONS = [one for one in PRODUCTIONS.values() if one.weight]
_WEIGHTS = [one.weight for one in _OPERATIONS]
assert productions.ALL, "the grammar is registered"


def program_of(seed: int, mode: str | None = None) -> Program:
    random = Random(seed)
    drawn = random.choices(list(MODES), list(MODES.values()))[0]
    mode = mode or drawn
    late_by = _MUCH_LATER if settles(mode) else 1
    return Program(seed, mode, _Plot(random, late_by).body(seed % _ONE_IN == 3))


class _Plot:
    def __init__(self, random: Random, late_by: int = 1) -> None:
        self.random = random
        self._late_by = late_by
        self._slots = INPUT
        self._made: list[int] = [INPUT]
        self._left = random.randint(3, MOST_OPERATIONS)

    def body(self, is_apart: bool) -> tuple[Statement, ...]:
        plots = [self._one_network] * 6 + [self._two_networks, self._gan, self._late, self._accumulated, self._in_hooks]
        body = self._apart() if is_apart else self.random.choice(plots)()
        for disturb, share in (
            (self._write, 0.4),
            (self._write, 0.15),
            (self._extra, 0.2),
            (self._raises, 0.08),
            (self._over_steps, 0.06),
        ):
            if self.random.random() < share:
                body = disturb(body)
        return tuple(body)

    # Plots.

    def _drawn(self, name: str, ins: tuple[int, ...] = (), out: int = -1, when: When = ALWAYS) -> Statement:
        return Statement(name, out, ins, PRODUCTIONS[name].draw(self.random), when)

    def _one_network(self) -> list[Statement]:
        forward = self._network(0, self._left)
        losses = [self._loss() for _ in range(self.random.choice([1, 1, 1, 2]))]
        backward = [self._drawn("backward", (loss.out,)) for loss in losses]
        if self.random.random() < 0.12:
            penalty = Statement("gradient_penalty", self._new(), (losses[0].out,), ("parameters",))
            losses.append(penalty)
            backward[0] = self._drawn("backward", (penalty.out,))
        return [self._drawn("zero_grad"), forward, *losses, *backward, self._step(0)]

    def _two_networks(self) -> list[Statement]:
        """Two networks, each with an optimizer, under one loss."""
        half = max(2, self._left // 2)
        first, second = self._network(0, half), self._network(1, half)
        loss = self._loss()
        body = [self._drawn("zero_grad"), first, second, loss, self._drawn("backward", (loss.out,))]
        return [*body, self._step(0), self._step(1)]

    def _gan(self) -> list[Statement]:
        """The second network trains on the output of the first, and the first trains through the second. n_critic is 1
        to 3."""
        half = max(2, self._left // 2)
        generator = self._network(0, half)
        critic = self._network(1, half)
        loss = self._loss()
        own = [critic, loss, self._drawn("backward", (loss.out,)), self._step(1)]
        self._made = [INPUT]
        again = self._network(1, half)
        other = self._loss()
        often = When(self.random.choice([1, 2, 3]))
        last = [again, other, self._drawn("backward", (other.out,)), self._step(0)]
        zeros = self._drawn("zero_grad")
        if self.random.random() < 0.5:  # the generator's graph is made before the critic's step, and used after it
            return [zeros, generator, *own, zeros, *[one._replace(when=often) for one in last]]
        return [zeros, critic, *own[1:], zeros, *[one._replace(when=often) for one in (generator, *last)]]

    def _late(self) -> list[Statement]:
        """The first network's backward runs after the second network's optimizer step."""
        half = max(2, self._left // 2)
        first = self._network(0, half)
        one = self._loss()
        self._made = [INPUT]
        second = self._network(1, half)
        two = self._loss()
        body = [self._drawn("zero_grad"), first, one, second, two, self._drawn("backward", (two.out,)), self._step(1)]
        return [*body, self._drawn("backward", (one.out,)), self._step(0)]

    def _accumulated(self) -> list[Statement]:
        """Two forwards and backwards of one network in each step."""
        body = [self._drawn("zero_grad")]
        for _ in range(2):
            self._made = [INPUT]
            body.append(self._network(0, max(2, self._left // 2)))
            loss = self._loss()
            body += [loss, self._drawn("backward", (loss.out,))]
        return [*body, self._step(0)._replace(when=When(self.random.choice([1, 1, 2])))]

    def _apart(self) -> list[Statement]:
        """One value with two readers, a custom function and another operation, and a separate backward through each."""
        trunk = self._network(0, max(2, self._left // 2))
        shared = self._made[-1]
        custom = self._drawn("custom", (shared,), self._new())
        reader = self._drawn("pointwise", (shared,), self._new())
        scaled = self._drawn("scale", (reader.out,), self._new())
        readers = Statement("network", -1, (), (0,), ALWAYS, (custom, reader, scaled))
        losses = [self._drawn("loss", (one.out,), self._new()) for one in (custom, scaled)]
        first = Statement("backward", -1, (losses[0].out,), ("retain",))
        second = Statement("backward", -1, (losses[1].out,), ("plain",))
        return [self._drawn("zero_grad"), trunk, readers, *losses, first, second, self._step(0)]

    def _in_hooks(self) -> list[Statement]:
        forward = self._network(0, self._left)
        loss = self._loss()
        backward = Statement("backward", -1, (loss.out,), ("plain",))
        return [self._drawn("zero_grad"), forward, loss, self._drawn("step_in_backward"), backward]

    def _step(self, part: int) -> Statement:
        return Statement("step", -1, (), (part, draw_kind(self.random)))

    def _loss(self) -> Statement:
        ins = (self._made[-1],) if self.random.random() < 0.7 else (self._made[-1], self._recent())
        return self._drawn("loss", ins, self._new())

    # Forwards.

    def _new(self) -> int:
        self._slots += 1
        return self._slots

    def _recent(self) -> int:
        return self.random.choice(self._made[-3:])

    def _network(self, part: int, count: int) -> Statement:
        body: list[Statement] = [self._operation("linear")] if self.random.random() < 0.5 else []
        while len(body) < count:
            body.append(self._block() if self.random.random() < 0.12 else self._operation())
        if self.random.random() < 0.15:  # the structure changes from step to step
            place = self.random.randrange(len(body))
            body[place] = body[place]._replace(when=self._sometimes())
        return Statement("network", -1, (), (part,), ALWAYS, tuple(body))

    def _sometimes(self) -> When:
        period = self.random.choice([1, 2, 3, 4])
        return When(period, self.random.randrange(period), self._late_by * self.random.choice([0, 0, 3, 4, 5]))

    def _operation(self, name: str | None = None) -> Statement:
        chosen: Production = PRODUCTIONS[name] if name else self.random.choices(_OPERATIONS, _WEIGHTS)[0]
        last = self._made[-1] if self.random.random() < 0.75 else self._recent()
        ins = (last,) if chosen.arity == 1 else (last, self._recent())
        out = self._new()
        self._made.append(out)
        return self._drawn(chosen.name, ins, out)

    def _block(self) -> Statement:
        name = self.random.choice(["flags_around", "flags_around", "flags_around", "autocast", "checkpoint", "no_grad"])
        if name == "checkpoint":
            start, before = self._made[-1], self._made
            self._made = [start]
            inner = tuple(self._operation() for _ in range(self.random.randint(1, 3)))
            out = self._new()
            self._made = [*before, out]
            return Statement(name, out, (start,), PRODUCTIONS[name].draw(self.random), ALWAYS, inner)
        inner = tuple(self._operation() for _ in range(self.random.randint(1, 3)))
        return self._drawn(name)._replace(body=inner)

    # Disturbances.

    def _inserted(self, body: list[Statement], one: Statement) -> list[Statement]:
        """Inserts a statement between any two others, within a network's forward or outside."""
        networks = [index for index, found in enumerate(body) if found.name == "network" and found.body]
        if networks and self.random.random() < 0.4:
            index = self.random.choice(networks)
            inner = list(body[index].body)
            inner.insert(self.random.randint(1, len(inner)), one)
            body[index] = body[index]._replace(body=tuple(inner))
            return body
        body.insert(self.random.randint(2, len(body)), one)
        return body

    def _write(self, body: list[Statement]) -> list[Statement]:
        name = self.random.choice(
            ["write_value"] * 2 + ["write_parameter"] * 2 + ["write_buffer", "write_input", "write_in_hook"]
        )
        slots = range(self._slots + 1)
        ins: tuple[int, ...] = ()
        if name == "write_value":
            ins = (self.random.choice(slots),)
        elif name == "write_in_hook":
            ins = (self.random.choice(slots), self.random.choice(slots))
        when = ALWAYS if self.random.random() < 0.6 else self._sometimes()
        return self._inserted(body, self._drawn(name, ins, when=when))

    def _extra(self, body: list[Statement]) -> list[Statement]:
        names, weights = ["transform", "traced", "dead_branch", "evaluation"], [2, 0.3, 3, 3]
        name = self.random.choices(names, weights)[0]
        when = self._sometimes() if name in ("transform", "traced") else ALWAYS
        return self._inserted(body, self._drawn(name, (self.random.randint(0, self._slots),), when=when))

    def _raises(self, body: list[Statement]) -> list[Statement]:
        name = self.random.choice(["raise", "raise_in_hook", "raise_in_hook"])
        ins = (self.random.randint(0, self._slots),) if name == "raise_in_hook" else ()
        period = self.random.choice([2, 3, 4])
        when = When(period, self.random.randrange(period))
        return self._inserted(body, Statement(name, -1, ins, (), when))

    def _over_steps(self, body: list[Statement]) -> list[Statement]:
        losses = [(index, one) for index, one in enumerate(body) if one.name == "loss"]
        index, loss = self.random.choice(losses)
        period = self.random.choice([2, 3])
        kept = Statement("keep_loss", loss.out, (loss.out,), (), When(period))
        used = Statement("late_backward", -1, (loss.out,), (), When(period, 1))
        body.insert(index + 1, kept)
        body.insert(1, used)
        return body
