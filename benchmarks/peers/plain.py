"""plain: PyTorch as it is, everything kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from benchmarks.peers.peer import Opened, Peer, Trial


class Plain(Peer):
    """Others are compared with it. Two steps settle: the first finds algorithms, the second their memory."""

    name = "plain"
    settling_steps = 2

    @contextlib.contextmanager
    def open(self, trial: Trial) -> Iterator[Opened]:
        yield Opened()


PLAIN = Plain()
