"""After any sequence of leases and returns, no two live blocks overlap, the counters balance, and the cap holds."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vdnn import _C, errors

KIB, MIB = 1 << 10, 1 << 20


class PoolMachine(RuleBasedStateMachine):
    """Leases, returns and trims in any order."""

    cap = 4 * MIB

    def __init__(self) -> None:
        super().__init__()
        self.device = _C.SimDevice(moves_bytes=False)
        self.pool = _C.PinnedPool(self.device, cap_bytes=self.cap, slab_bytes=64 * KIB)
        self.blocks: list[_C.PinnedBlock] = []

    @rule(size=st.integers(1, MIB))
    def lease(self, size: int) -> None:
        try:
            self.blocks.append(self.pool.allocate(size))
        except errors.PinnedMemoryError:
            assert sum(block.bytes for block in self.blocks) + size > self.cap // 8

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.blocks:
            self.blocks.pop(data.draw(st.integers(0, len(self.blocks) - 1)))

    @rule()
    def trim(self) -> None:
        self.pool.trim()

    @invariant()
    def books_balance(self) -> None:
        stats = self.pool.stats
        assert stats.live_bytes == sum(block.bytes for block in self.blocks)
        assert stats.live_bytes <= stats.pinned_bytes <= self.cap
        spans = sorted((block.address, block.address + block.bytes) for block in self.blocks)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))

    def teardown(self) -> None:
        self.pool.close()
        self.device.close()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=100, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
