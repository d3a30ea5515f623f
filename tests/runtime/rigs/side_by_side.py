"""Runs a step plain and under a session, from the same state and random numbers, and compares the two bit for bit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from vdnn.runtime.session.session import Session

Owner = torch.nn.Module | torch.Tensor
Step = Callable[[], torch.Tensor | Sequence[torch.Tensor]]


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Tells whether the two have the same type and bits: a NaN equals itself, and 0.0 is not -0.0."""
    if left is None or right is None:
        return left is right
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(_raw(left), _raw(right))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def outcome(step: Step, owners: Sequence[Owner]) -> list[tuple[str, torch.Tensor | None]]:
    """Runs `step` from the owners' present state. Returns outputs, gradients and buffers, by name."""
    states = [_state(owner) for owner in owners]
    torch.manual_seed(1)
    try:
        outputs = step()
        named: list[tuple[str, torch.Tensor | None]] = [
            (f"output {index}", output.detach().clone())
            for index, output in enumerate([outputs] if isinstance(outputs, torch.Tensor) else outputs)
        ]
        named += [(name, None if found is None else found.clone()) for name, found in _results(owners)]
        return named
    finally:
        for owner, state in zip(owners, states, strict=True):
            _restore(owner, state)


def differences(plain: list[tuple[str, torch.Tensor | None]], ours: list[tuple[str, torch.Tensor | None]]) -> list[str]:
    assert [name for name, _ in plain] == [name for name, _ in ours]
    return [name for (name, left), (_, right) in zip(plain, ours, strict=True) if not same_bits(left, right)]


def assert_same_as_plain(session: Session, step: Step, *owners: Owner) -> None:
    """Runs `step` with and without the session. Outputs, gradients and buffers must have the same bits, and the session
    must have moved bytes."""
    plain = outcome(step, owners)
    assert any(name.startswith("grad") and found is not None for name, found in plain), "the step makes no gradient"
    gone = session.counters.storages + session.counters.discarded
    with session:
        ours = outcome(step, owners)
    differing = differences(plain, ours)
    assert not differing, f"not as plain: {differing}"
    assert session.counters.storages + session.counters.discarded > gone, session.report()
    assert_nothing_alive(session)


def alive(session: Session) -> dict[str, int]:
    """Everything that a session still holds: on the host, in flight and in its records. Empty if it holds nothing."""
    found = {
        "managed storages": len(session._engine.saves.managed),
        "table entries": len(session._engine.saves.table),
    }
    for transport in session._engine.transports.values():
        if transport is None:
            continue
        transport.queue.collect()
        transport.release_sources()
        queue = transport.queue.stats
        found["host bytes"] = transport.pool.stats.live_bytes
        found["offloads in flight"] = queue.offload_in_flight_bytes
        found["reloads in flight"] = queue.reload_in_flight_bytes
        found["reload window"] = transport.reload_in_flight_bytes
    return {name: count for name, count in found.items() if count}


def assert_nothing_alive(session: Session) -> None:
    if alive(session):
        gc.collect()
    left = alive(session)
    assert not left, f"still alive: {left}"


def on_threads(*programs: Callable[[], None]) -> None:
    """Runs the programs at once, and raises an error that one of them raised."""
    problems: list[BaseException] = []

    def guarded(program: Callable[[], None]) -> None:
        try:
            program()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def _state(owner: Owner) -> dict[str, torch.Tensor]:
    if isinstance(owner, torch.Tensor):
        owner.grad = None
        return {"": owner.detach().clone()}
    owner.zero_grad(set_to_none=True)
    return {name: value.clone() for name, value in owner.state_dict().items()}


def _restore(owner: Owner, state: dict[str, torch.Tensor]) -> None:
    if isinstance(owner, torch.Tensor):
        with torch.no_grad():
            owner.copy_(state[""])
        owner.grad = None
    else:
        owner.load_state_dict(state)
        owner.zero_grad(set_to_none=True)


def _results(owners: Sequence[Owner]) -> Iterable[tuple[str, torch.Tensor | None]]:
    for index, owner in enumerate(owners):
        if isinstance(owner, torch.Tensor):
            yield f"grad of leaf {index}", owner.grad
            continue
        for name, parameter in owner.named_parameters():
            yield f"grad of {index}.{name}", parameter.grad
        for name, buffer in owner.named_buffers():
            yield f"buffer {index}.{name}", buffer
