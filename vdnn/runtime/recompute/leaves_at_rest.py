"""The versions of the leaves that recipes of a session's plans read, noted at the ends of steps.

Where calls of modules are followed, the versions are noted at the calls. While calls are at rest, those of the end of
the step before have to do. They tell what an operation read if nothing writes to the leaves between that end and the
operation: a session whose optimizer runs behind the ends of its steps never rests.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from vdnn.runtime.recompute.leaf_versions import noted_version, observe_parameters


class LeavesAtRest:
    """The leaves of one session, by the modules that have them."""

    def __init__(self) -> None:
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._versions: dict[int, int] = {}  # at the end of the last step, by the identity of the leaf
        self._are_early = False  # those notes were made before the step that runs had begun

    def need(self, module: torch.nn.Module) -> None:
        """A recipe of the plan reads a leaf of this module."""
        self._modules[id(module)] = weakref.ref(module)

    def step_ended(self, *, at_save: bool) -> bool:
        """Notes the versions. True if those of the end before were right for the step that is over. `at_save`: the next
        step has begun, so operations ahead of its first save may have read leaves."""
        if not self._modules:
            return True
        were_right = self._are_early and all(
            self._versions.get(id(leaf)) == noted_version(leaf) for leaf in self._leaves()
        )
        self._versions = {id(leaf): leaf._version for leaf in self._leaves()}
        for module in self._living():
            observe_parameters(module)
        self._are_early = not at_save
        return were_right

    def _living(self) -> Iterator[torch.nn.Module]:
        return (module for reference in list(self._modules.values()) if (module := reference()) is not None)

    def _leaves(self) -> Iterator[torch.Tensor]:
        for module in self._living():
            yield from (one for one in module._parameters.values() if one is not None)
