"""The state that a program runs in: parameters, buffers, optimizers and the values of a step, made from the seed.

Two worlds of one program are equal bit for bit. Statements are compiled to closures once. A value is released after the
last statement that reads it, as a local variable of a forward would be, so that saves really are offloaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.fuzz.grammar import PRODUCTIONS
from tests.fuzz.program import INPUT, SETTLED_STEPS, STEPS, Program, Statement, flattened
from tests.fuzz.shapes import COLUMNS, ROWS

Run = Callable[[], None]


LATE = 2  # the step before this one is recorded and planned; this one follows the plan


class PlannedError(Exception):
    """Raised by a program that is meant to raise."""


class World:
    def __init__(self, program: Program) -> None:
        self.program = program
        generator = torch.Generator().manual_seed(program.seed)
        self._numbers = torch.randn(2048, generator=generator)
        self._taken = 0
        self._inputs = torch.randn(SETTLED_STEPS, ROWS, COLUMNS, generator=generator)
        self.part = 0
        self.parameters: list[list[nn.Parameter]] = [[], []]
        self.buffers: list[torch.Tensor] = []
        self.optimizers: dict[Any, torch.optim.Optimizer] = {}
        self.step = 0
        self.schedule = 0  # added to the step number where a number changes from step to step
        self.values: dict[int, torch.Tensor] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.held: list[Any] = []  # until the end of the step
        self.over_steps: dict[int, torch.Tensor] = {}
        self.trace: list[tuple[str, bytes | None]] = []
        self.hooks_raise = True
        self.unseen_writes = 0  # writes so far that no version counter shows
        self.writes_without_graph = 0  # writes so far to results that have a graph, which does not show them
        self.late_writes = 0  # writes by statements that first wrote when a plan had been made
        self._first_writes: dict[int, int] = {}  # the step of each statement's first write
        self._last_uses = _last_uses(program)
        self._at = 0
        self._runs = [self.compiled(one) for one in program.body]

    # Called by productions while they are built.

    def numbers(self, *shape: int) -> torch.Tensor:
        """Numbers drawn from the seed, as a new copy."""
        count = 1
        for size in shape:
            count *= size
        if self._taken + count > 2048:
            self._taken = 0
        taken = self._numbers[self._taken : self._taken + count].reshape(shape).clone()
        self._taken += count
        return taken

    def parameter(self, *shape: int, scale: float = 0.4, shift: float = 0.0) -> nn.Parameter:
        return self.adopt(nn.Parameter(self.numbers(*shape).mul_(scale).add_(shift)))

    def adopt(self, parameter: nn.Parameter) -> nn.Parameter:
        self.parameters[self.part].append(parameter)
        return parameter

    def module(self, module: nn.Module, *, fill: bool = True) -> nn.Module:
        """Fills the module, and registers its parameters and buffers with the world."""
        for one in module.parameters():
            if fill:
                with torch.no_grad():
                    one.copy_(self.numbers(*one.shape).mul_(0.4))
            self.adopt(one)
        self.buffers += [one for one in module.buffers() if one.dtype == torch.float32]
        return module

    def buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        self.buffers.append(tensor)
        return tensor

    def compiled(self, statement: Statement) -> Run:
        run = PRODUCTIONS[statement.name].build(self, statement)
        dying = self._last_uses.get(self._at, ())
        self._at += 1
        period, phase, first = statement.when
        if not dying and period == 1 and not first:
            return run

        def guarded() -> None:
            if self.step >= first and self.step % period == phase:
                run()
            for slot in dying:
                self.values.pop(slot, None)

        return guarded

    # Called by productions while they run.

    def value(self, slot: int) -> torch.Tensor:
        found = self.values.get(slot)
        return self.values[INPUT] if found is None else found

    def note(self, label: str, tensor: torch.Tensor | None) -> None:
        self.trace.append((label, None if tensor is None else bits(tensor)))

    def note_write(self, statement: Statement, *, is_seen: bool) -> None:
        """Counts a write for which vdnn may raise where plain PyTorch does not: see outcomes.may_refuse."""
        first = self._first_writes.setdefault(id(statement), self.step)
        self.unseen_writes += not is_seen
        self.late_writes += first >= LATE

    def note_write_to_value(self, value: torch.Tensor) -> None:
        """Counts a write that is about to be made to a value, if its graph will not show it."""
        self.writes_without_graph += value.grad_fn is not None and not torch.is_grad_enabled()

    def note_gradients(self) -> None:
        for part in self.parameters:
            for index, one in enumerate(part):
                self.note(f"grad {index}", one.grad)

    def all_parameters(self) -> list[nn.Parameter]:
        return [*self.parameters[0], *self.parameters[1]]

    # Steps.

    def run_step(self, step: int) -> None:
        self.step = step
        self.trace = []
        # torch.manual_seed would also seed generators that keep a list of their seeds
        torch.default_generator.manual_seed(self.program.seed * STEPS + step)
        self.values[INPUT] = self._inputs[step].clone()
        before = switches()
        try:
            for run in self._runs:
                run()
        finally:
            left = switches()
            if left != before:
                self.trace.append((f"switches left as {left}, before {before}", b""))
            self.values.clear()
            self.losses.clear()
            self.held.clear()

    def note_state(self) -> None:
        for part in self.parameters:
            for index, one in enumerate(part):
                self.note(f"parameter {index}", one)
        for index, buffer in enumerate(self.buffers):
            self.note(f"buffer {index}", buffer)


def switches() -> tuple[object, ...]:
    """Settings of torch that a step must not change."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of the tensor's values. Avoids torch operations where it can, because a virtual machine counts them."""
    if not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _last_uses(program: Program) -> dict[int, list[int]]:
    """The slots that no later statement reads, by the number of their last statement in running order."""
    last: dict[int, int] = {}
    for number, one in enumerate(flattened(program.body)):
        for slot in (*one.ins, one.out):
            last[slot] = number
    found: dict[int, list[int]] = {}
    for slot, number in last.items():
        if slot > INPUT:
            found.setdefault(number, []).append(slot)
    return found
