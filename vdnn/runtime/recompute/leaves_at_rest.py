"""The versions of the leaves that recipes of a session's plans read, noted at the ends of steps.

Where calls of modules are followed, the versions are noted at the calls. While calls are at rest, those of the end of
the step before have to do. They tell what an operation read if nothing writes to the leaves between that end and the
operation: a session whose optimizer runs behind the ends of its steps never rests.
"""

from __future__ import annotations

import weakref

import torch

from vdnn.runtime.recompute.leaf_versions import observe


class LeavesAtRest:
    """The leaves of one session, by the modules that have them."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[torch.nn.Module], set[str]]] = {}  # by the identity of the module
        self._versions: dict[int, int] = {}  # at the end of the last step, by the identity of the leaf
        self._are_early = False  # those notes were made before the step that runs had begun

    def need(self, module: torch.nn.Module, leaf: torch.Tensor) -> None:
        """A recipe of the plan reads this leaf of the module."""
        reference, names = self._names.get(id(module), (None, set()))
        if reference is None or reference() is not module:
            self._names[id(module)] = weakref.ref(module), names
        names.update(name for name, one in module._parameters.items() if one is leaf)

    def step_ended(self, *, at_save: bool) -> bool:
        """Notes the versions. True if those of the end before were right for the step that is over. `at_save`: the next
        step has begun, so operations ahead of its first save may have read leaves."""
        if not self._names:
            return True
        were_right, versions = self._are_early, dict[int, int]()
        for reference, names in list(self._names.values()):
            module = reference()
            leaves = {} if module is None else module._parameters
            for name in names:
                leaf = leaves.get(name)
                if leaf is not None and leaf.is_leaf and not leaf.is_inference():
                    was_right = observe(leaf, module) == self._versions.get(id(leaf))
                    were_right, versions[id(leaf)] = were_right and was_right, leaf._version
        self._versions, self._are_early = versions, not at_save
        return were_right
