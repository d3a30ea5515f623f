"""How peers save memory in a step, modelled on a virtual machine from their sources.

Torch's own checkpointing runs as it is. What the others' hooks copy, when their streams wait for each other, and what
they keep alive meanwhile is written down here from the named sources; none of their code runs, because their copies
need a GPU. The host is taken to run ahead of the device, as in all of these.

[Note: Windows] A copy to the host keeps its source alive until the compute stream has waited for it:

* axolotl, `checkpoint_activation_offload.py`: the two newest sources of layer inputs. DeepSpeed's engine is derived
  from it (#8282), and keeps the last input on the device.
* axolotl, `activation_offload_checkpoint.py` (`hidden_states`, after ALST): the same, and in backward the input of the
  layer before is reloaded one layer ahead.
* TRL, `activation_offloading.py`, which torchtune's became: the five newest saves. A save of a storage that is still
  among them is not copied, and stays on the device until its use. In backward a node's saves are reloaded when it asks
  for them, behind the node before the last one.
* transformers, `offload: True` (#48444): save_on_cpu, so each copy blocks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.peers.checkpoint import checkpointed, outermost
from benchmarks.peers.peer import Moved
from benchmarks.peers.published.side_stream import SideStream
from benchmarks.peers.save_on_cpu import BlockingCopies
from vdnn import _C
from vdnn.runtime.machine.virtual_machine import VirtualMachine

Way = Callable[[nn.Module, Sequence[str], VirtualMachine], contextlib.AbstractContextManager[None]]
_LEAST_BYTES = 1024  # of a tensor that is offloaded, in TRL and axolotl
_AXOLOTL_WINDOW = 2
_TRL_WINDOW = 5


@contextlib.contextmanager
def plain(model: nn.Module, blocks: Sequence[str], machine: VirtualMachine) -> Iterator[None]:
    """Everything is kept."""
    yield


@contextlib.contextmanager
def recomputed(model: nn.Module, blocks: Sequence[str], machine: VirtualMachine) -> Iterator[None]:
    """torch.utils.checkpoint of every block, not re-entrant."""
    with checkpointed(model, blocks, functools.partial(checkpoint, use_reentrant=False)):
        yield


@dataclass(slots=True)
class _Away:
    """A tensor on the host, by its form."""

    shape: torch.Size
    dtype: torch.dtype
    nbytes: int


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Returning:
    """Makes tensors on the device for what is reloaded: memory without a time, because the copy has its own."""

    def __init__(self, machine: VirtualMachine) -> None:
        self._machine = machine

    def tensor(self, away: _Away) -> torch.Tensor:
        self._machine.aside_ns = 0
        try:
            return torch.empty(away.shape, dtype=away.dtype)
        finally:
            self._machine.aside_ns = None


class LayerInputsAway:
    """Hooks that offload the inputs of checkpointed blocks, and nothing else. See [Note: Windows].

    `ahead`: how many further inputs are reloaded before the one that is used. `stays`: the positions of inputs that
    are not offloaded, counted from the first."""

    def __init__(self, machine: VirtualMachine, *, ahead: int = 0, stays: frozenset[int] = frozenset()) -> None:
        self._side = SideStream(machine)
        self._returning = _Returning(machine)
        self._ahead = ahead
        self._stays = stays
        self._marked: set[int] = set()
        self._away: dict[int, _Away] = {}
        self._leaving: dict[int, tuple[torch.Tensor, _C.Event]] = {}
        self._returned: dict[int, tuple[torch.Tensor, _C.Event]] = {}
        self._count = 0

    def mark(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._marked.add(inputs[0].untyped_storage()._cdata)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | int:
        storage = tensor.untyped_storage()._cdata
        if storage not in self._marked or _nbytes(tensor) < _LEAST_BYTES:
            return tensor
        self._marked.discard(storage)
        number = self._count
        self._count += 1
        if number in self._stays:
            return tensor
        for older in [one for one in self._leaving if one <= number - _AXOLOTL_WINDOW]:
            self._side.compute_waits(self._leaving.pop(older)[1])
        self._side.follow_compute()
        self._leaving[number] = (tensor, self._side.offload(_nbytes(tensor)))
        self._away[number] = _Away(tensor.shape, tensor.dtype, _nbytes(tensor))
        return number

    def unpack(self, packed: torch.Tensor | int) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        for number in range(packed, packed - 1 - self._ahead, -1):
            if number in self._away and number not in self._returned:
                self._returned[number] = self._reloaded(number)
        tensor, event = self._returned.pop(packed)
        self._side.compute_waits(event)
        return tensor

    def _reloaded(self, number: int) -> tuple[torch.Tensor, _C.Event]:
        away = self._away.pop(number)
        if number in self._leaving:  # its source is still there
            return self._leaving.pop(number)
        return self._returning.tensor(away), self._side.reload(away.nbytes)


def inputs_away(*, ahead: int = 0, keeps_last: bool = False) -> Way:
    """torch's checkpointing, with LayerInputsAway."""

    @contextlib.contextmanager
    def way(model: nn.Module, blocks: Sequence[str], machine: VirtualMachine) -> Iterator[None]:
        found = outermost(model, blocks)
        hooks = LayerInputsAway(machine, ahead=ahead, stays=frozenset({len(found) - 1} if keeps_last else ()))
        handles = [block.register_forward_pre_hook(hooks.mark) for block in found]
        try:
            with (
                recomputed(model, blocks, machine),
                torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack),
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()

    return way


class SavesAway:
    """Hooks that offload every saved tensor but parameters. See [Note: Windows]."""

    def __init__(self, machine: VirtualMachine, model: nn.Module) -> None:
        self._side = SideStream(machine)
        self._returning = _Returning(machine)
        self._parameters = {one.untyped_storage()._cdata for one in model.parameters()}
        self._leaving: dict[int, tuple[torch.Tensor, _C.Event, tuple[int, int]]] = {}
        self._tracked: dict[tuple[int, int], int] = {}
        self._count = 0
        self._node: object = None
        self._here: dict[int, torch.Tensor] = {}
        self._used: dict[int, _C.Event] = {}
        self.kept_bytes = 0  # of saves that stay because their storage was leaving

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple[int, _Away]:
        self._count += 1
        storage = tensor.untyped_storage()._cdata
        key = (storage, int(tensor.storage_offset()))
        if key in self._tracked:
            self._tracked[key] = self._count
            self.kept_bytes += _nbytes(tensor)
            return tensor
        if storage in self._parameters or _nbytes(tensor) < _LEAST_BYTES:
            return tensor
        number = self._count
        for older in [one for one in self._leaving if one <= number - _TRL_WINDOW]:
            self._release(older)
        self._side.follow_compute()
        source = tensor if tensor.is_contiguous() or 0 in tensor.stride() else tensor.contiguous()
        nbytes = tensor.untyped_storage().nbytes() if 0 in tensor.stride() else _nbytes(tensor)
        self._leaving[number] = (source, self._side.offload(nbytes), key)
        self._tracked[key] = number
        return number, _Away(tensor.shape, tensor.dtype, nbytes)

    def unpack(self, packed: torch.Tensor | tuple[int, _Away]) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        number, away = packed
        node = torch._C._current_autograd_node()
        before = list(self._here) if node is not self._node else []
        self._node = node
        is_reloaded = number not in self._leaving
        if is_reloaded:
            tensor = self._returning.tensor(away)
            self._side.compute_waits(self._side.reload(away.nbytes))
            self._here[number] = tensor
        else:
            tensor = self._leaving[number][0]

        def after(outputs: Any, inputs: Any) -> None:
            if is_reloaded and number in self._here:
                self._used[number] = self._side.mark_compute()
            for one in list(self._leaving):
                self._release(one)
            for one in before:
                if one in self._used:
                    self._side.wait(self._used.pop(one))
                self._here.pop(one, None)

        node.register_hook(after)
        return tensor

    def _release(self, number: int) -> None:
        _, event, key = self._leaving.pop(number)
        self._side.compute_waits(event)
        if self._tracked.get(key) == number:
            del self._tracked[key]

    def close(self) -> None:
        self._here.clear()
        self._leaving.clear()


def saves_away(*, recomputes: bool) -> Way:
    """SavesAway, around torch's checkpointing or without it."""

    @contextlib.contextmanager
    def way(model: nn.Module, blocks: Sequence[str], machine: VirtualMachine) -> Iterator[None]:
        hooks = SavesAway(machine, model)
        with contextlib.ExitStack() as stack:
            if recomputes:
                stack.enter_context(recomputed(model, blocks, machine))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack))
            stack.callback(hooks.close)
            yield

    return way


@contextlib.contextmanager
def inputs_away_blocking(model: nn.Module, blocks: Sequence[str], machine: VirtualMachine) -> Iterator[None]:
    """torch's checkpointing with save_on_cpu around it, for the inputs of blocks."""
    hooks = BlockingCopies(machine, Moved(), has_data=False)
    marked: set[int] = set()

    def pack(tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()._cdata
        if storage not in marked:
            return tensor
        marked.discard(storage)
        return hooks.pack(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else hooks.unpack(packed)

    handles = [
        block.register_forward_pre_hook(lambda module, inputs: marked.add(inputs[0].untyped_storage()._cdata))
        for block in outermost(model, blocks)
    ]
    try:
        with recomputed(model, blocks, machine), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for handle in handles:
            handle.remove()


WAYS: dict[str, Way] = {
    "plain": plain,
    "checkpoint": recomputed,
    "checkpoint, inputs away": inputs_away(),
    "checkpoint, inputs away, last kept": inputs_away(keeps_last=True),
    "checkpoint, inputs away, one ahead": inputs_away(ahead=1),
    "checkpoint, inputs away, blocking": inputs_away_blocking,
    "checkpoint, saves away": saves_away(recomputes=True),
    "saves away": saves_away(recomputes=False),
}
