"""Draws a whole training from its seed: models, optimizers, what happens ahead of the session, and a loop."""

from __future__ import annotations

from random import Random

from tests.fuzz.program import ALWAYS, INPUT, Program, Statement, When
from tests.fuzz.trainings import aliases, blocks, hooks, lives, optimizers, steps
from tests.fuzz.trainings.grammar import BLOCKS, STATEMENTS
from tests.fuzz.trainings.optimizers import draw_optimizer
from tests.fuzz.trainings.steps import draw_backward, draw_forward, draw_step
from tests.fuzz.trainings.ways import draw_mode
from tests.fuzz.trainings.world import SESSIONS

ALL = (aliases, blocks, hooks, lives, optimizers, steps)  # importing them registers every production
_DISTURBANCES = [one for one in STATEMENTS.values() if one.weight]
_WEIGHTS = [one.weight for one in _DISTURBANCES]
# Those that make sense ahead of the session.
_EARLY = [
    name
    for name, often in {
        **dict.fromkeys(("accumulated_hook", "alias"), 2),
        **dict.fromkeys(("tensor_hook", "module_hook", "optimizer_hook", "average", "scheduler", "save", "freeze"), 1),
    }.items()
    for _ in range(often)
]

_SELDOM = 5  # of so many steps one


def program_of(seed: int, mode: str | None = None) -> Program:
    random = Random(seed)
    drawn = draw_mode(random)
    return Program(seed, mode or drawn, tuple(_Plot(random).body()))


class _Plot:
    def __init__(self, random: Random) -> None:
        self.random = random
        self._slots = INPUT

    def body(self) -> list[Statement]:
        plots = [self._one_net] * 5 + [self._gan, self._taught, self._two_losses, self._in_hooks]
        plots += [self._accumulated] * 2
        early, loop = self.random.choice(plots)()
        for _ in range(self.random.choice([0, 0, 1, 1, 2, 3])):
            early.append(self._drawn(self.random.choice(_EARLY)))
        if self.random.random() < 0.2:  # the optimizer has a state when the session begins
            early += [one for one in loop if one.name != "raise"]
        for _ in range(self.random.choice([1, 2, 3, 4, 5])):
            loop.insert(self.random.randint(0, len(loop)), self._disturbance())
        sessions = "one" if self.random.random() < 0.6 else self.random.choice(SESSIONS)
        return [*early, Statement("loop", -1, (), (sessions,), ALWAYS, tuple(loop))]

    # Plots. Each returns what is ahead of the session, and the loop.

    def _one_net(self) -> tuple[list[Statement], list[Statement]]:
        early = [self._net(0, self.random.randint(1, 4)), self._optimizer(0)]
        return early, [self._zero(0), *self._pass(0), *self._clipped(0), self._step(0), *self._scheduled(0)]

    def _accumulated(self) -> tuple[list[Statement], list[Statement]]:
        early = [self._net(0, self.random.randint(1, 3)), self._optimizer(0)]
        passes = [one for _ in range(self.random.choice([2, 2, 3])) for one in self._pass(0)]
        step = self._step(0)._replace(when=When(self.random.choice([1, 1, 2])))
        return early, [self._zero(0)._replace(when=step.when), *passes, *self._clipped(0), step]

    def _in_hooks(self) -> tuple[list[Statement], list[Statement]]:
        early = [self._net(0, self.random.randint(1, 3)), self._drawn("optimizers_in_hooks")]
        return early, [self._zero(0), *self._pass(0)]

    def _gan(self) -> tuple[list[Statement], list[Statement]]:
        early = [self._net(0, 2), self._net(1, 2), self._optimizer(0), self._optimizer(1)]
        made = self._forward(0, INPUT, "plain")
        judged = self._forward(1, made.out, "detached")
        own = self._drawn("loss", (judged.out,), self._new())
        again = self._forward(1, made.out, "plain")
        other = self._drawn("loss", (again.out,), self._new())
        loop = [self._zero(1), made, judged, own, self._backward(own), self._step(1)]
        return early, [*loop, self._zero(0), again, other, self._backward(other), *self._clipped(0), self._step(0)]

    def _taught(self) -> tuple[list[Statement], list[Statement]]:
        """A student and a momentum teacher."""
        early = [self._net(0, self.random.randint(1, 3)), Statement("teacher"), self._optimizer(0)]
        wanted = self._forward(1, INPUT, "no_grad")
        found = self._forward(0, INPUT)
        loss = self._drawn("loss", (found.out, wanted.out), self._new())
        follow = self._drawn("follow")
        loop = [self._zero(0), wanted, found, loss, self._backward(loss), self._step(0)]
        loop.insert(self.random.choice([0, 1, len(loop)]), follow)
        return early, loop

    def _two_losses(self) -> tuple[list[Statement], list[Statement]]:
        """Two nets one behind the other, each with an optimizer, under one loss; one optimizer may step less often."""
        early = [self._net(0, 2), self._net(1, 2), self._optimizer(0), self._optimizer(1)]
        first = self._forward(0, INPUT)
        second = self._forward(1, first.out)
        loss = self._drawn("loss", (second.out,), self._new())
        often = When(self.random.choice([1, 2, 3]))
        zeros = [self._zero(0), self._zero(1)._replace(when=often)]
        steps = [self._step(0), self._step(1)._replace(when=often)]
        return early, [*zeros, first, second, loss, self._backward(loss), *self._clipped(1), *steps]

    # Parts of plots.

    def _new(self) -> int:
        self._slots += 1
        return self._slots

    def _drawn(self, name: str, ins: tuple[int, ...] = (), out: int = -1, when: When = ALWAYS) -> Statement:
        return Statement(name, out, ins, STATEMENTS[name].draw(self.random), when)

    def _net(self, part: int, count: int) -> Statement:
        drawn = self.random.choices(list(BLOCKS.values()), [one.weight for one in BLOCKS.values()], k=count)
        body = [Statement(one.name, -1, (), one.draw(self.random)) for one in drawn]
        return Statement("net", -1, (), (part,), ALWAYS, tuple(body))

    def _optimizer(self, part: int) -> Statement:
        return Statement("optimizer", -1, (), (part, *draw_optimizer(self.random)))

    def _forward(self, part: int, source: int, how: str = "") -> Statement:
        (drawn,) = draw_forward(self.random)
        return Statement("forward", self._new(), (source,), (part, how or drawn))

    def _backward(self, loss: Statement) -> Statement:
        return Statement("backward", -1, (loss.out,), draw_backward(self.random))

    def _pass(self, part: int) -> list[Statement]:
        forward = self._forward(part, INPUT)
        loss = self._drawn("loss", (forward.out,), self._new())
        found = [forward, loss, self._backward(loss)]
        if self.random.random() < 0.1:
            found.insert(2, self._drawn("penalty", (loss.out,)))
        return found

    def _clipped(self, part: int) -> list[Statement]:
        if self.random.random() < 0.6:
            return []
        drawn = self._drawn("clip")
        return [drawn._replace(args=(drawn.args[0], part))]

    def _step(self, part: int) -> Statement:
        return Statement("step", -1, (), (part, *draw_step(self.random)))

    def _zero(self, part: int) -> Statement:
        drawn = self._drawn("zero_grad")
        return drawn._replace(args=(part, drawn.args[1]))

    def _scheduled(self, part: int) -> list[Statement]:
        if self.random.random() < 0.85:
            return []
        return [Statement("scheduler", -1, (), (part, "step")), Statement("schedule", -1, (), (part,))]

    # Disturbances.

    def _disturbance(self) -> Statement:
        chosen = self.random.choices(_DISTURBANCES, _WEIGHTS)[0]
        return Statement(chosen.name, -1, (), chosen.draw(self.random), self._when(chosen.name))

    def _when(self, name: str) -> When:
        """Hooks and aliases are made in one step of five; other things are too, or from a step on, or more often."""
        once = When(_SELDOM, self.random.randrange(_SELDOM))
        if name.endswith("hook") or name in ("alias", "raise") or self.random.random() < 0.4:
            return once
        return self.random.choice([ALWAYS, ALWAYS, When(2, 1), When(3, 2), When(1, 0, 3)])
