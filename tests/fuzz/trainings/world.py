"""The state of a whole training: models, optimizers, hooks, aliases, and what is noted of them in each step.

Two worlds of one program are equal bit for bit. A training begins with what its program does ahead of the session, and
goes on with steps of one loop. It is divided into sessions as the loop says (`SESSIONS`); plain PyTorch has the same
divisions without a session.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.fuzz.program import Program, Statement
from tests.fuzz.shapes import COLUMNS, ROWS
from tests.fuzz.trainings.grammar import STATEMENTS

Run = Callable[[], None]
Trace = list[tuple[str, "bytes | None"]]
# Makes the session of a training, or a context without one.
Open = Callable[["Training"], contextlib.AbstractContextManager[Any]]

# How a loop is divided into sessions: one around all steps; one that is entered for each step; a new one for every few
# steps, closed or left to the collector; one that begins late or ends early.
SESSIONS = ("one", "each step", "epochs", "open epochs", "late", "early")
_LATE, _BEHIND_EARLY = 2, 2  # steps without a session


class PlannedError(Exception):
    """Raised by a program that is meant to raise."""


class Clock:
    """The number of the step, for modules. A copy of a module has the same clock."""

    def __init__(self) -> None:
        self.step = 0
        self.raises_behind = -1  # the number of the block behind which the forward raises

    def __deepcopy__(self, memo: object) -> Clock:
        return self


class Alias(NamedTuple):
    """Memory of a parameter, a gradient, a state or a buffer that the program holds."""

    label: str
    read: Callable[[], torch.Tensor]  # a tensor over this memory
    is_inside: bool  # taken inside of a session


class StepOutcome(NamedTuple):
    error: BaseException | None
    trace: Trace


class Training:
    def __init__(self, program: Program, *, steps: int = 5, steps_on_cpu: bool = False) -> None:
        self.program = program
        self.steps_on_cpu = steps_on_cpu
        self.steps = steps
        self.clock = Clock()
        generator = torch.Generator().manual_seed(program.seed)
        self._inputs = torch.randn(steps, ROWS, COLUMNS, generator=generator)
        self.nets: dict[int, nn.Module] = {}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.schedulers: dict[int, Any] = {}
        self.groups_out: dict[int, list[Any]] = {}
        self.hooks: list[Any] = []
        self.aliases: list[Alias] = []
        self.saved: list[Any] = []
        self.copies: dict[Any, Any] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.trace: Trace = []
        self.is_inside = False
        self.is_looping = False
        self.unseen_writes = 0  # writes so far that no version counter shows
        self.sessions = "one"
        self._loop: Run = _nothing
        self._session: Any = None
        torch.default_generator.manual_seed(program.seed)
        for run in [self.compiled(one) for one in program.body]:
            try:
                run()
            except Exception as error:
                self.trace.append((f"ahead of the session: {error!r}", b""))

    # Called by productions.

    @property
    def step(self) -> int:
        return self.clock.step

    def net(self, part: int) -> nn.Module | None:
        return self.nets.get(part) or next(iter(self.nets.values()), None)

    def optimizer(self, part: int) -> torch.optim.Optimizer | None:
        return self.optimizers.get(part) or next(iter(self.optimizers.values()), None)

    def parameters(self, part: int) -> list[nn.Parameter]:
        net = self.net(part)
        return [] if net is None else list(net.parameters())

    def whole(self) -> nn.Module:
        """All nets as one module."""
        nets = list(self.nets.values())
        return nets[0] if len(nets) == 1 else nn.ModuleList(nets)

    def parameter(self, part: int, number: int) -> nn.Parameter | None:
        found = self.parameters(part)
        return found[number % len(found)] if found else None

    def compiled(self, statement: Statement) -> Run:
        run: Run = STATEMENTS[statement.name].build(self, statement)
        period, phase, first = statement.when

        def guarded() -> None:
            if self.step >= first and self.step % period == phase:
                run()

        return run if period == 1 and not first else guarded

    def loop(self, sessions: str, runs: list[Run]) -> None:
        self.sessions = sessions

        def run() -> None:
            for one in runs:
                one()

        self._loop = run

    def batch(self) -> torch.Tensor:
        return self._inputs[self.step].clone()

    def note(self, label: str, tensor: torch.Tensor | None) -> None:
        self.trace.append((label, None if tensor is None else bits(tensor)))

    def note_gradients(self) -> None:
        for part in self.nets:
            for index, one in enumerate(self.parameters(part)):
                self.note(f"gradient {part}.{index}", one.grad)

    def note_parameters(self) -> None:
        for part, net in self.nets.items():
            for index, one in enumerate(net.parameters()):
                self.note(f"parameter {part}.{index}{'' if one.requires_grad else ', frozen'}", one)

    def note_buffers(self) -> None:
        for part, net in self.nets.items():
            for name, one in net.named_buffers():
                self.note(f"buffer {part}.{name}", one)

    def note_state(self) -> None:
        for part, optimizer in self.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                self.trace.append((f"options {part}.{index} {_options(group)}", b""))
                for number, one in enumerate(group["params"]):
                    for name, value in optimizer.state.get(one, {}).items():
                        self.note(f"state {part}.{index}.{number} {name}", torch.as_tensor(value))

    def note_aliases(self) -> None:
        for index, alias in enumerate(self.aliases):
            self.note(f"alias {index} {alias.label}", alias.read())

    def note_all(self) -> None:
        self.note_parameters()
        self.note_gradients()
        self.note_state()
        self.note_buffers()
        self.note_aliases()

    # The loop.

    def outcomes(self, open_session: Open) -> Generator[StepOutcome]:
        """Yields the state after each step, and last the state at the end of the training. The loop of the training
        catches an exception in a step, and goes on."""
        self.is_looping = True
        try:
            for step in range(self.steps):
                self.clock.step = step
                yield StepOutcome(_without_frames(self._caught(lambda: self._one_step(open_session))), self._taken())
            yield StepOutcome(_without_frames(self._caught(self._end)), self._taken())
        finally:  # also if the comparison ends early
            if self.is_inside:
                self._leave(None)

    def _caught(self, run: Run) -> BaseException | None:
        try:
            run()
        except Exception as error:
            return error
        return None

    def _one_step(self, open_session: Open) -> None:
        step = self.step
        if self._session is None and self._begins(step):
            self._session = open_session(self)
        if self._session is not None and not self.is_inside:
            self._session.__enter__()
            self.is_inside = True
        error = self._caught(self._run_loop)
        if self._leaves(step):
            # A session for one step sees the exception that ends it.
            self._leave(error if self.sessions == "each step" else None)
            if self.sessions != "each step":
                self._session = None
        if error is not None:
            raise error

    def _end(self) -> None:
        if self.is_inside:
            self.note_all()
            self._leave(None)
        _closed(self._session)
        self.note_all()

    def _run_loop(self) -> None:
        # torch.manual_seed would also seed generators that keep a list of their seeds
        torch.default_generator.manual_seed(self.program.seed * self.steps + self.step)
        self.clock.raises_behind = -1
        try:
            self._loop()
        finally:
            self.values.clear()
            self.losses.clear()

    def _begins(self, step: int) -> bool:
        if self.sessions == "late":
            return step >= _LATE
        return self.sessions != "early" or step < self.steps - _BEHIND_EARLY

    def _leaves(self, step: int) -> bool:
        if not self.is_inside:
            return False
        if self.sessions in ("epochs", "open epochs"):
            epoch = max(2, self.steps // 2)
            return step % epoch == epoch - 1
        return self.sessions == "each step" or (self.sessions == "early" and step == self.steps - _BEHIND_EARLY - 1)

    def _leave(self, error: BaseException | None) -> None:
        """Leaves the session. What the program took hold of inside ends with it: parameters and states then have memory
        of the device again, so an alias of their host memory cannot follow them."""
        self.is_inside = False
        self.aliases = [alias for alias in self.aliases if not alias.is_inside]
        self._session.__exit__(None if error is None else type(error), error, None)
        if self.sessions in ("epochs", "early"):
            _closed(self._session)

    def _taken(self) -> Trace:
        taken, self.trace = self.trace, []
        return taken


def _nothing() -> None:
    """The loop of a program without one."""


def _closed(session: Any) -> None:
    close = getattr(session, "close", None)
    if close is not None:
        close()


def _without_frames(error: BaseException | None) -> BaseException | None:
    if error is not None:
        error = error.with_traceback(None)
        error.__context__ = error.__cause__ = None
    return error


def _options(group: dict[str, Any]) -> str:
    numbers = (int, float, bool, str, tuple)
    return str({name: one for name, one in group.items() if isinstance(one, numbers)})


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of the tensor's values."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
