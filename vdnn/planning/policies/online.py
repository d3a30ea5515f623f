"""What a policy without a recording is asked, and what it is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple


class SaveFacts(NamedTuple):
    """A tensor that autograd is about to hold, as a policy sees it.

    `module_kind` is the class name of the innermost torch module whose forward is running, "" outside of all. `is_conv`
    says whether that module is a convolution: known here because a subclass has another name.
    """

    storage_bytes: int
    module_kind: str
    is_conv: bool


class OnlinePolicy(ABC):
    """Decides at the save, from the save alone."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As users write it."""

    @property
    def may_offload(self) -> bool:
        """False: nothing is ever offloaded, and nobody needs asking."""
        return True

    @property
    def offloads_everything(self) -> bool:
        """True: every eligible storage leaves, and nobody needs asking."""
        return False

    @property
    def recomputes(self) -> bool:
        """True: what can be recomputed from other saves is given up for that, and only the rest is asked about."""
        return False

    @abstractmethod
    def offloads(self, save: SaveFacts) -> bool:
        """True if the storage is to leave the device. Asked at every eligible save until one says so."""
