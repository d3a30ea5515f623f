"""Decides which saves stay on the device, and gives the reason. The hooks ask at every save.

Some saves always stay (parameters, marked tensors, paused threads). Others stay only if no plan covers them and the
policy keeps them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from vdnn.planning.policies import OnlinePolicy, SaveFacts
from vdnn.runtime.storage.counters import Kept
from vdnn.runtime.torch_internals.module_watch import ModuleWatch, is_conv
from vdnn.runtime.torch_internals.storage_set import StorageSet
from vdnn.runtime.torch_internals.tensor_kinds import CAST, is_cast_of_a_leaf, is_view_of_a_cast

_Node = torch.autograd.graph.Node
_Parameter = torch.nn.Parameter


class Exemptions:
    """The exemptions of one session. With `recasts`, autocast's casts of parameters may be cast again."""

    def __init__(self, policy: OnlinePolicy, modules: ModuleWatch, marked: StorageSet, *, recasts: bool) -> None:
        self._policy = policy
        self._offloads_everything = policy.offloads_everything
        self.modules = modules
        self.parameters = modules.parameters
        self.marked = marked
        self._recasts = recasts
        self._local = threading.local()  # `paused`: how many paused() this thread is inside
        # True once any thread has paused. Until then a save need not read the thread-local. The native mover reads it.
        self.was_paused = False

    def always(self, tensor: torch.Tensor, storage: torch.UntypedStorage, node: _Node | None) -> Kept | None:
        """The reason to keep this save under every policy and plan, or None. `node` is the tensor's grad_fn."""
        if self.was_paused and self.is_paused:
            return Kept.PAUSED
        address = storage._cdata
        if address in self.parameters.addresses and storage in self.parameters:
            return Kept.PARAMETER
        # A leaf may be a view of a tensor without grad, and a view of a leaf is not a leaf: check tensor and base.
        if node is None and (tensor.requires_grad or type(tensor) is _Parameter or self._is_own_buffer(tensor)):
            return Kept.PARAMETER
        base = tensor._base
        if base is not None:
            node = base.grad_fn
            if node is None and base.requires_grad:
                return Kept.PARAMETER
        if not self._recasts and type(node).__name__ == CAST and node is not None and is_cast_of_a_leaf(node):
            return Kept.PARAMETER_CAST  # with recasts, see without_plan
        if address in self.marked.addresses and storage in self.marked:
            return Kept.MARKED
        return Kept.MARKED if self.modules.marked.references and self.modules.in_marked() else None

    def _is_own_buffer(self, tensor: torch.Tensor) -> bool:
        """True if this is a buffer of the running module. Its forward may have given it other memory."""
        module = self.modules.innermost()
        return module is not None and any(one is tensor for one in module._buffers.values())

    @property
    def keeps_everything(self) -> bool:
        """True if the policy moves nothing."""
        return not self._policy.may_offload

    def without_plan(self, storage: torch.UntypedStorage, node: _Node | None) -> Kept | None:
        """The reason to keep this save if no plan decides about it, or None: the policy decides."""
        if self._recasts and node is not None and is_view_of_a_cast(node):
            return Kept.PARAMETER_CAST
        if self._offloads_everything:
            return None
        if not self._policy.may_offload:
            return Kept.POLICY
        module = self.modules.innermost()
        kind = "" if module is None else type(module).__name__
        return None if self._policy.offloads(SaveFacts(storage.nbytes(), kind, is_conv(module))) else Kept.POLICY

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Saves of this thread stay on the device while the context is entered."""
        self.was_paused = True
        self._local.paused = getattr(self._local, "paused", 0) + 1
        try:
            yield
        finally:
            self._local.paused -= 1

    @property
    def is_paused(self) -> bool:
        """True while this thread is inside paused()."""
        return self.was_paused and getattr(self._local, "paused", 0) > 0
