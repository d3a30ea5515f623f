"""Explores every order of a small program, none twice. A missing edge gives a wrong result in some of the orders."""

from __future__ import annotations

from collections.abc import Callable
from math import comb

import pytest
import torch

from deferred import DeferredAccelerator, explore

Read = Callable[[], torch.Tensor]


def two_streams(*, waits: bool, keeps: bool = True) -> Callable[[DeferredAccelerator], Read]:
    """A side stream reads the result of the first stream. Then the first stream reads the side stream's result, which
    the program may have released by then."""

    def program(accelerator: DeferredAccelerator) -> Read:
        compute, side = torch.accelerator.current_stream(), torch.Stream(device="deferred")
        x = torch.ones(4, device="deferred")
        if waits:
            side.wait_event(compute.record_event())
        with side:
            y = x * 3
        if waits:
            compute.wait_event(side.record_event())
        z = y + x
        held = (x, y) if keeps else ()

        def read() -> torch.Tensor:
            return z.cpu() if held is not None else z

        return read

    return program


def test_with_every_edge_all_orders_agree() -> None:
    orders = list(explore(two_streams(waits=True)))
    assert all(torch.equal(result, torch.full((4,), 4.0)) for result, _ in orders)
    assert orders


def test_without_an_edge_some_order_is_wrong() -> None:
    results = [result for result, _ in explore(two_streams(waits=False), checked=False)]
    assert any(torch.equal(result, torch.full((4,), 4.0)) for result in results)
    assert any(not torch.equal(result, torch.full((4,), 4.0)) for result in results)


def test_memory_given_up_too_early_is_wrong_in_some_order() -> None:
    """The side stream may reuse its memory as soon as the program releases it, even if another stream still reads
    it."""
    results = [result for result, _ in explore(two_streams(waits=True, keeps=False), checked=False)]
    assert any(torch.equal(result, torch.full((4,), 4.0)) for result in results)
    assert any(not torch.equal(result, torch.full((4,), 4.0)) for result in results)


@pytest.mark.slow
def test_all_orders_are_tried_and_none_twice() -> None:
    def independent(accelerator: DeferredAccelerator) -> Read:
        with torch.Stream(device="deferred"):
            a = torch.zeros(2, device="deferred")
            for _ in range(2):
                a = a.add_(1)
        with torch.Stream(device="deferred"):
            b = torch.zeros(2, device="deferred")
            for _ in range(2):
                b = b.add_(1)
        return lambda: a.cpu() + b.cpu()

    orders = [tuple(order) for _, order in explore(independent)]
    assert len(set(orders)) == len(orders)
    # Three operations on each stream.
    assert len(orders) == comb(6, 3)


def test_too_many_orders_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deferred.exploration.MOST_ORDERS", 2)
    with pytest.raises(Exception, match="more than 2 orders. Make it smaller"):
        list(explore(two_streams(waits=False)))
