"""plain: unchanged PyTorch, which keeps everything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from benchmarks.peers.peer import Opened, Peer, Trial


class Plain(Peer):
    """The reference for all other peers. Of its two settling steps the first finds algorithms, the second allocates
    their memory."""

    name = "plain"
    settling_steps = 2

    @contextlib.contextmanager
    def open(self, trial: Trial) -> Iterator[Opened]:
        yield Opened()


PLAIN = Plain()
