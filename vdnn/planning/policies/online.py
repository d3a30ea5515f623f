"""The interface of online policies, which decide at each save without a recording."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple


class SaveFacts(NamedTuple):
    """The facts that an online policy gets about a tensor that autograd is about to save.

    `module_kind` is the class name of the innermost torch module whose forward is running, or "" outside of modules.
    `is_conv` says whether that module is a convolution, also if it is a subclass with another name.
    """

    storage_bytes: int
    module_kind: str
    is_conv: bool


class OnlinePolicy(ABC):
    """Decides at each save whether to offload it, from the facts of that save alone."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The policy's name, as users write it."""

    @property
    def may_offload(self) -> bool:
        """False: nothing is ever offloaded, and offloads() is not called."""
        return True

    @property
    def offloads_everything(self) -> bool:
        """True: every eligible storage is offloaded, and offloads() is not called."""
        return False

    @property
    def recomputes(self) -> bool:
        """True: storages that can be recomputed from other saves are discarded, and only the others may be
        offloaded."""
        return False

    @property
    def is_repeatable(self) -> bool:
        """True: two saves with the same facts are always decided alike, and smaller storages of the same operation as
        larger ones. A step that saves and uses what an earlier one did, in the same sizes or smaller ones, then follows
        what was decided in that one, and offloads() is not called again."""
        return False

    @abstractmethod
    def offloads(self, save: SaveFacts) -> bool:
        """True to offload the storage. Called at every eligible save of a storage until one call returns True."""
