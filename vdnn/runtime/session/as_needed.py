"""Decides how much of the training state a session manages that was given a model and an optimizer, but no more.

[Note: Extent] The optimizers' state always leaves, as far as the budget asks for it. Gradients and parameters leave too
only where the budget has no room for them, because they cross the link more often than they need to otherwise, and a
parameter that leaves is a tensor of the CPU between calls of modules. The extent is chosen as the session begins, from
the bytes that are on the device by then. It grows when a recorded step, or one that has begun, cannot meet the budget:
as a step ends, or at the next step of an optimizer, where nothing else runs. It never shrinks, and later sessions of
the same model that share an engine begin with it. Managed state may still stay on the device, see state_room.py.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

import torch

from vdnn.bytesize import format_bytes
from vdnn.errors import BudgetError, VdnnError
from vdnn.planning.least_memory import least_bytes_without_gradients
from vdnn.runtime.session.first_optimizer_step import bytes_of_step
from vdnn.runtime.torch_internals.module_watch import has_compiled
from vdnn.runtime.torch_internals.tensor_kinds import plain_part
from vdnn.runtime.training_state.optimizer_state import OptimizerState, TransportFor
from vdnn.runtime.training_state.parameters.managed_parameters import GivenModel, ManagedParameters
from vdnn.runtime.training_state.slices import parameters_of
from vdnn.runtime.training_state.state_copies import StateCopies
from vdnn.runtime.training_state.state_room import StateKind
from vdnn.runtime.training_state.state_tensors import bytes_of_first_state, temporary_bytes
from vdnn.step.recording import Recording
from vdnn.step.training_plan import TrainingPlan

BudgetBytes = Callable[[int], int | None]  # of a device with this many bytes
logger = logging.getLogger("vdnn")
_LEAST_ROOM = 8  # one part in this many of the budget is left for activations
_MOST_WAITS = 3  # steps at which the session should not grow


class Extent(IntEnum):
    """How much of the training state a session manages."""

    STATE = 0
    GRADIENTS = 1
    PARAMETERS = 2

    @property
    def text(self) -> str:
        return ("the optimizers' state", "state and gradients", "state, gradients and parameters")[self]


class GrownExtents:
    """The extents of the models of one engine, and the step that was refused."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[torch.nn.Module, Extent] = weakref.WeakKeyDictionary()
        self._current: weakref.ref[AsNeeded] | None = None  # of the session that was entered last
        self._grow: weakref.WeakMethod[Callable[[], None]] | None = None  # of that session
        self._now = Extent.STATE
        self._error: BudgetError | None = None
        self._recording: Recording | None = None  # of the step of this error, if it has ended
        self._waits = 0

    def of(self, model: torch.nn.Module) -> Extent | None:
        """None if no session of this model was entered."""
        return self._of.get(model)

    def begin(self, as_needed: AsNeeded, now: Extent, grow: Callable[[], None]) -> None:
        """`grow`, a method of the session, is called between steps once one was refused."""
        self._current, self._grow = weakref.ref(as_needed), weakref.WeakMethod(grow)
        self._of[as_needed.model] = self._now = now
        self._error, self._recording, self._waits = None, None, 0

    def error(self, as_needed: AsNeeded) -> BudgetError | None:
        """That of the step that was refused, if it was one of this model."""
        current = None if self._current is None else self._current()
        return self._error if current is not None and current.model is as_needed.model else None

    def least_bytes(self, error: BudgetError, gradient_bytes: int) -> int:
        """The bytes that the step of this error needs if its gradients, of this many bytes, leave. They may be there as
        a step begins: in a later micro-batch, or if the program writes zeros to them."""
        recording = self._recording
        if recording is None or recording.resident_bytes - recording.parameter_bytes >= gradient_bytes:
            return error.least_bytes - gradient_bytes
        return least_bytes_without_gradients(recording)

    def refused(self, error: VdnnError, recording: Recording | None) -> bool:
        """Called if a step cannot meet the budget, with its recording if it has ended. True if more can leave for it,
        which it does as the step ends, or at a step of an optimizer."""
        current = None if self._current is None else self._current()
        if current is None or not isinstance(error, BudgetError) or self._now >= current.largest():
            return False
        if self._error is None:
            self._error, self._recording, self._waits = error, recording, 0
        return True

    def step_ended(self) -> None:
        """Called between two steps, outside of all locks. More leaves from now on if a step was refused."""
        grow = None if self._grow is None else self._grow()
        if grow is not None and self._error is not None:
            grow()

    def waits(self, error: BudgetError, *, may_grow: bool) -> bool:
        """Called at a step at which the session should not grow. True if a later one is awaited. Several times are
        waited for: then the extent grows all the same, or the error is raised if it may not."""
        self._waits += 1
        if self._waits < _MOST_WAITS:
            return True
        if may_grow:
            return False
        self.give_up()
        raise error

    def give_up(self) -> None:
        """From now on steps are refused."""
        self._current = self._error = None


class AsNeeded:
    """Chooses the extent of one session: see [Note: Extent]."""

    def __init__(
        self, model: torch.nn.Module, states: Sequence[OptimizerState], plan: TrainingPlan | None = None
    ) -> None:
        """`plan`, of this model, says what leaves: the session begins with that."""
        self._model = GivenModel(model)
        self._plan = plan
        self._states = states
        self._parameters: ManagedParameters | None = None
        self.lines: list[str] = []  # for the report

    @property
    def model(self) -> torch.nn.Module:
        return self._model()

    def let_go(self) -> None:
        """The session is closed: it holds the model no more."""
        self._model.let_go()
        if self._parameters is not None:
            self._parameters.let_go()

    @property
    def parameters(self) -> ManagedParameters:
        """Raises VdnnError where parameters cannot leave: compiled modules, DDP, DTensors."""
        if self._parameters is None:
            self._parameters = ManagedParameters(self.model, are_trained=True)
        return self._parameters

    def largest(self) -> Extent:
        if has_compiled():  # compiled code reads parameters where no hook is
            return Extent.GRADIENTS
        try:
            _ = self.parameters
        except VdnnError:
            return Extent.GRADIENTS
        return Extent.PARAMETERS

    def at_begin(self, transport_for: TransportFor, budget_bytes: BudgetBytes) -> Extent:
        """The extent for a session that begins with what the model and its optimizers have on the device now."""
        if self._plan is not None:
            return _extent_of(self._plan)
        trained = [one for state in self._states for one in parameters_of(state.optimizer) if one.requires_grad]
        device = next((one.device for one in trained if one.device.type != "meta"), None)
        transport = None if device is None else transport_for(device)
        most_bytes = None if transport is None else budget_bytes(transport.device.info.total_bytes)
        if transport is None or most_bytes is None:
            return Extent.STATE
        window_bytes = StateCopies(transport).window_bytes
        weights = {id(one): one for one in (*self.model.parameters(), *self.model.buffers(), *trained)}
        weight_bytes = _bytes_on(device, weights.values())
        gradient_bytes = _bytes_on(device, trained)
        room_bytes = most_bytes - most_bytes // _LEAST_ROOM
        largest_bytes, stepped_bytes = max(map(_bytes_of_step, self._states), key=sum)
        if (
            weight_bytes + gradient_bytes + window_bytes <= room_bytes
            and weight_bytes + gradient_bytes + stepped_bytes <= most_bytes
        ):
            return Extent.STATE
        if weight_bytes + 2 * window_bytes <= room_bytes and weight_bytes + largest_bytes + stepped_bytes <= most_bytes:
            return Extent.GRADIENTS
        return Extent.PARAMETERS

    def staying(self) -> dict[StateKind, set[int]] | None:
        """The ids of the parameters that stay, or whose gradient or state does, as the plan says it; None without."""
        if self._plan is None:
            return None
        placed = {one.name: one for one in self._plan.parameters}
        staying: dict[StateKind, set[int]] = {kind: set() for kind in StateKind}
        for name, parameter in self.model.named_parameters():
            one = placed.get(name)
            leaving = (False, False, False) if one is None else (one.streams, one.gradient_leaves, one.state_leaves)
            for kind, leaves in zip(StateKind, leaving, strict=True):
                if not leaves:
                    staying[kind].add(id(parameter))
        return staying

    def beyond(self, now: Extent, error: BudgetError, extents: GrownExtents, transport_for: TransportFor) -> Extent:
        """The next extent: with parameters, if the gradients have too few bytes for what was refused."""
        there = [state.optimizer for state in self._states if not state.is_gone]
        trained = [one for optimizer in there for one in parameters_of(optimizer) if one.requires_grad]
        least_bytes = extents.least_bytes(error, sum(one.nbytes for one in trained))
        transport = next((one for parameter in trained if (one := transport_for(parameter.device)) is not None), None)
        if transport is not None:
            least_bytes += StateCopies(transport).window_bytes  # for those on their way
        is_enough = now is Extent.STATE and least_bytes <= error.budget_bytes
        return min(Extent.GRADIENTS if is_enough else Extent.PARAMETERS, self.largest())

    def note(self, extent: Extent, error: BudgetError | None) -> None:
        if error is None and self._plan is not None:
            self.lines = [f"  the plan of {self._plan.model} is followed: what leaves was given, and what stays"]
            return
        if extent is Extent.STATE:
            self.lines = []
            return
        why = "the budget has no room for them" if error is None else f"{format_bytes(error.least_bytes)} were needed"
        self.lines = [f"  {extent.text} leave the device: {why}"]
        logger.info("vdnn:%s", self.lines[0])


def check_plan_of(plan: TrainingPlan, model: torch.nn.Module) -> None:
    """Raises ValueError if no session follows the plan, or not for this model."""
    if plan.problem:
        raise ValueError(f"plan: no session follows this one: {plan.problem}.")
    found: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters():
        part = plain_part(parameter)
        if part is not None:
            storage = part.untyped_storage()
            found.setdefault(storage._cdata, (name, storage.nbytes()))
    difference = plan.difference(dict(found.values()))
    if difference:
        raise ValueError(f"plan: expected one of this model, got that of {plan.model}: {difference}.")


def _extent_of(plan: TrainingPlan) -> Extent:
    if any(one.streams for one in plan.parameters):
        return Extent.PARAMETERS
    return Extent.GRADIENTS if any(one.gradient_leaves for one in plan.parameters) else Extent.STATE


def _bytes_of_step(state: OptimizerState) -> tuple[int, int]:
    """The largest gradient of an optimizer, and what the first step of its parameter takes beside it: the state, and
    temporary results. They are guessed if that step cannot be tried: none of the latter if it is fused."""
    optimizer = state.optimizer
    found = [
        (part, group)
        for group in optimizer.param_groups
        for part in (plain_part(one) for one in group["params"] if one.requires_grad)
        if part is not None
    ]
    if not found:
        return 0, 0
    largest, group = max(found, key=lambda one: one[0].nbytes)
    taken_bytes = bytes_of_step(optimizer, group, largest)
    if taken_bytes is None:
        temporary = 0 if group.get("fused") else temporary_bytes([largest])
        taken_bytes = bytes_of_first_state(largest, min_bytes=0) + temporary
    return largest.nbytes, taken_bytes


def _bytes_on(device: torch.device | None, tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of their storages on `device`, of what is plain memory."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        part = plain_part(tensor)
        if part is not None and part.device == device:
            storage = part.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())
