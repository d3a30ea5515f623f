"""The points of settled steps at which something is recomputed or encoded, beside the saves and uses of the program.

A recompute uses what it reads, each use at a point of its own, and the native gate stays open over them. Bytes are
encoded at the first hook after their operation.

[Note: Order of a recompute] The points of what a recompute reads come before that of the use that needs it. So the gate
calls for that use while it expects the first of them. They are served one after another inside the recompute. If one of
them is not as in the script, the Python hooks continue from there, and so does the recompute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vdnn import _C
from vdnn.runtime.recompute import note_saved, observe_flags_at_save
from vdnn.runtime.recompute.node_notes import NativeSave
from vdnn.runtime.recompute.readers import may_be_overwritten
from vdnn.runtime.session.missing import recomputed
from vdnn.runtime.steps.settling import Followed, Settling
from vdnn.runtime.steps.step_script import NO_LIFETIME, Event, EventKind
from vdnn.runtime.storage.discarded import CountedRecipe
from vdnn.runtime.storage.kept import kept_tensor
from vdnn.runtime.storage.packed_view import PackedView
from vdnn.runtime.torch_internals.tensor_kinds import transform_level

if TYPE_CHECKING:
    from vdnn.runtime.session.planned_hooks import PlannedHooks


class PlannedRecomputes:
    """The recomputes of one session's settled steps. Callers hold the packer's lock."""

    def __init__(self, hooks: PlannedHooks, settling: Settling) -> None:
        self._hooks = hooks
        self._packer = hooks.packer
        self._settling = settling

    @property
    def _gate(self) -> _C.Gate:
        return self._hooks.gate

    @property
    def are_waiting(self) -> bool:
        """True if something is to be encoded at the next hook."""
        recipes = self._packer.recipes
        return recipes is not None and recipes.are_waiting

    def encode(self, followed: Followed, index: int) -> bool:
        """Encodes what waits for this event of the script. False if that differs from the script."""
        event, recipes = followed.script.events[index], self._packer.recipes
        if recipes is None or not (recipes.are_waiting or event.encoded) or followed.encoded_at == index:
            return True
        followed.to_encode, followed.encoded_at = event.encoded, index
        recipes.encode_complete()
        is_right = not followed.to_encode and self._gate.is_open
        followed.to_encode = ()
        return is_right

    # What the gate discards and recomputes by itself.

    def recipe_for(
        self, followed: Followed, tensor: torch.Tensor, save: _C.LightSave, index: int
    ) -> CountedRecipe | None:
        """The recipe for this save of a settled step. None if it is not known to be exact here, or is to be checked:
        then the save is Python's."""
        packer, event = self._packer, followed.script.events[index]
        recipes, node = packer.recipes, tensor.grad_fn
        if recipes is None or node is None or event.key is None:
            return None
        observe_flags_at_save()
        if not self.encode(followed, index):
            return None
        followed.step.save_key, followed.step.save_form = event.key, event.form
        recipe = recipes.proven(tensor, node, event.key, followed.script.proven, index, self._hooks.transport)
        if recipe is None:
            return None
        if event.is_read:
            note_saved(node, tensor.output_nr, save)
        packer.readers.forget_index()
        return CountedRecipe(recipe)

    def restore_light(self, save: _C.LightSave) -> None:
        """Recomputes the storage of a save that the gate discarded."""
        counted: CountedRecipe = save.recipe
        if counted.needs_recomputes:
            self._packer.missing.recompute_for(save)
        else:
            # The code that uses the save only reads, so the gate itself serves its saves as operands.
            is_native = not counted.recipe.operands
            save.restore(recomputed(save, self._gate.unpack if is_native else self.unpack_operand))

    def unpack_operand(self, packed: PackedView | NativeSave) -> torch.Tensor:
        """Unpacks what a recompute reads."""
        followed = self._settling.followed
        tensor = None if followed is None else self._planned_operand(followed, packed)
        if tensor is None:
            tensor = self._packer.unpack(packed)
            self._settling.used_operand(packed)
        return tensor

    def _planned_operand(self, followed: Followed, packed: PackedView | NativeSave) -> torch.Tensor | None:
        event = self.expected(followed)
        if event is None or event.kind is not EventKind.OPERAND or transform_level() is not None:
            return None
        if isinstance(packed, _C.LightSave):
            tensor: torch.Tensor = self._gate.unpack(packed)  # which knows its lifetime
            return tensor
        index = self._gate.position
        if isinstance(packed, _C.KeptSave):
            if packed.step != self._gate.step or packed.lifetime != event.lifetime:
                return None
        elif not is_lifetime(followed, event, packed) or not self.prepare(packed):
            return None
        if not self._hooks.is_at(index) or not self.encode(followed, index):
            return None
        if isinstance(packed, _C.KeptSave):
            tensor = kept_tensor((packed.tensor, packed.version))
            self._packer.counters.uses += 1
            self._packer.counters.used_in_place += 1
        else:
            tensor = self._packer.unpacked(packed)
        self._gate.advance()
        self._hooks.act(followed, index)
        return tensor

    def expected(self, followed: Followed) -> Event | None:
        """The next event of the settled step, if this thread uses what the step saved."""
        gate, events = self._gate, followed.script.events
        return events[gate.position] if gate.is_open and gate.uses_here and gate.position < len(events) else None

    def prepare(self, packed: PackedView) -> bool:
        """Does what has to be done before a use: recomputes what was discarded, and whatever reads what may be
        overwritten. False if the packer's own hook has to do it."""
        managed = packed.managed
        if may_be_overwritten():
            if managed.container is not None:
                return False
            managed.keep_reloaded()  # as in the packer's own hook
        self._packer.restore(managed)
        return True


def is_lifetime(followed: Followed, event: Event, packed: PackedView) -> bool:
    """True if this is the lifetime of the event, in the step that runs."""
    watched = packed.managed.watched
    if watched is None or watched.observer is not followed.step:
        return False
    if event.lifetime == NO_LIFETIME:
        return watched.number is None and watched.planned == event.planned
    return watched.number == event.lifetime
