"""Makes the saves that the native gate keeps movable: each becomes a packed view of a managed storage.

The gate keeps a save as autograd does, so a guard cannot evict it. That is right as long as the step is the settled
one. A step that differs may take more, and a graph may outlive its step: then its saves are managed like all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vdnn import _C
from vdnn.runtime.steps.settling import Followed
from vdnn.runtime.storage.transport import Transport
from vdnn.step.plan import Action

if TYPE_CHECKING:
    from vdnn.runtime.session.hooks import Packer


def manage_kept(packer: Packer, gate: _C.Gate, followed: Followed, transport: Transport) -> None:
    """Manages the saves that the gate has kept in this step and that are alive. A save that was written to stays as it
    is, because its use raises an error. Called under the packer's lock, while the gate is closed."""
    for save in gate.saves():
        tensor = save.tensor
        if save.step != gate.step or tensor._version != save.version:
            continue
        storage = tensor.untyped_storage()
        packed, is_new = packer.manage(tensor, storage, None, transport)
        managed, planned = packed.managed, followed.script.planned.get(save.lifetime)
        if is_new:
            managed.action = Action.KEEP
            followed.step.begin_planned(managed, save.lifetime, planned)
            if planned is not None:
                followed.executor.follow(planned, managed)
            followed.step.guard_passed(managed, save.lifetime)
        else:
            packer.counters.shared_saves -= 1  # the script has counted it
        save.replace(packed)
    packer.readers.forget_index()
