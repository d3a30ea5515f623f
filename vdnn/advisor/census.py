"""Counts what one step does while it runs, on tensors with or without data: products by dtype, convolutions, host
syncs, gradients filled with zeros, biases before batch norms, and debugging tools that are on.

A rehearsal does not have the values that the host asks for. The census answers with the value that a real step got at
the same line, or else as any rehearsal does.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.autocast_mode import autocast
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vdnn.advisor.diagnostics import tools_that_are_on
from vdnn.advisor.host_reads import HostReads
from vdnn.advisor.host_syncs import SCALER, VALUE, HostSync, PythonCalls, sync_of
from vdnn.runtime.rehearsal.chosen_sizes import chosen_by_mask, run_with_size
from vdnn.runtime.rehearsal.source_place import user_place

_aten = torch.ops.aten
_CONVOLUTIONS = frozenset({"convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", *_CONVOLUTIONS})
_FILLS = (_aten.zero_.default, _aten._foreach_zero_.default)


@dataclass(slots=True)
class Counts:
    """The counts of one step. `products` counts those of forward and backward, including convolutions, by dtype."""

    products: Counter[torch.dtype] = field(default_factory=Counter)
    products_tf32_could_take: int = 0
    convolutions: int = 0
    filled_gradients: int = 0
    filled_bytes: int = 0
    syncs: Counter[tuple[str, str]] = field(default_factory=Counter)
    waited_ns: Counter[tuple[str, str]] = field(default_factory=Counter)
    biases: tuple[NormBias, ...] = ()
    tools: set[str] = field(default_factory=set)

    @property
    def host_syncs(self) -> tuple[HostSync, ...]:
        return tuple(HostSync(*key, count, self.waited_ns[key]) for key, count in self.syncs.items())


class Census(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts. Enter it after a virtual machine.

    A real step notes in `host_reads` the values that the host got, and a rehearsal gets them again. `scale` is the
    rehearsed batch as a multiple of the real one. `aside` is entered for operations on tensors that are always on the
    host.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        host_reads: HostReads,
        aside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        scale: float = 1.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters, self._optimizer = list(model.parameters()), optimizer
        self._host_reads, self._aside, self._scale = host_reads, aside, scale
        self._python = PythonCalls(self._count_sync, self._look_at_graph)
        self._machine: FakeTensorMode | None = None
        self._counters: set[int] = set()
        self.counts = Counts()

    def __enter__(self) -> Census:
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        self._machine = mode if isinstance(mode, FakeTensorMode) else None
        on_cpu = self._machine is not None or not any(one.is_cuda for one in self._parameters)
        self._calls = card_calls(stands_for_card=on_cpu, on_synchronize=self._count_synchronize)
        self._calls.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        self._python.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self._python.__exit__(*exception)  # type: ignore[no-untyped-call]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._calls.__exit__(None, None, None)

    def _count_synchronize(self) -> None:
        self._count_sync(user_place(), "torch.cuda.synchronize()")

    def begin_step(self) -> None:
        self.counts = Counts()
        self._counters = _host_counters(self._optimizer)
        self._host_reads.begin_step(is_real=self._machine is None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._machine is None:
            self.counts.tools.update(tools_that_are_on())
        self._count_operation(func, args)
        call = None if self._python.is_aside else sync_of(func, args, kwargs)
        if call is not None:
            self._count_sync(user_place(), call if call == SCALER else self._python.call or call)
        if func is VALUE:
            return self._value(func, args)
        mask = chosen_by_mask(func, args)
        if mask is not None:
            return self._sized(func, args, mask)
        if self._counters and self._is_counter(func, args):
            with self._aside():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _count_operation(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._overloadpacket.__name__
        forward = name.removesuffix("_backward")
        if forward in _PRODUCTS:
            dtype = next(one.dtype for one in args if isinstance(one, torch.Tensor))
            self.counts.products[dtype] += 1
            self.counts.convolutions += forward in _CONVOLUTIONS
            self.counts.products_tf32_could_take += dtype is torch.float32 and forward not in _CONVOLUTIONS
        elif func in _FILLS:
            gradients = {id(one.grad) for one in self._parameters if one.grad is not None}
            filled = [one for one in tree_leaves(args) if id(one) in gradients]
            self.counts.filled_gradients += len(filled)
            self.counts.filled_bytes += sum(one.numel() * one.itemsize for one in filled)

    def _count_sync(self, place: str, call: str) -> None:
        self.counts.syncs[place, call] += 1

    def _look_at_graph(self, loss: torch.Tensor) -> None:
        self.counts.biases += tuple(norm_biases(loss))

    def _value(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The value that the host asks for. On a GPU this is timed: the host waits for all work queued before."""
        if self._machine is not None:
            known = self._host_reads.replay("value", user_place())
            if known is None:
                return func(*args)  # the rehearsal's own value, or its stand-in
            dtype = args[0].dtype
            return bool(known) if dtype is torch.bool else float(known) if dtype.is_floating_point else int(known)
        begin_ns = time.perf_counter_ns()
        value = func(*args)
        place = user_place()
        self._host_reads.note("value", place, value)
        if args[0].is_cuda:
            self.counts.waited_ns[place, self._python.call or "a value read"] += time.perf_counter_ns() - begin_ns
        return value

    def _sized(self, func: Any, args: tuple[Any, ...], mask: torch.Tensor) -> Any:
        place = user_place()
        if self._machine is None:
            self._host_reads.note("size", place, int(mask.count_nonzero()))
            return func(*args)
        size = self._host_reads.replay("size", place)
        return func(*args) if size is None else run_with_size(func, args, round(size * self._scale))

    def _is_counter(self, func: Any, args: tuple[Any, ...]) -> bool:
        return any(id(leaf) in self._counters for leaf in tree_leaves(args[:1]))


def _host_counters(optimizer: torch.optim.Optimizer | None) -> set[int]:
    """The ids of step counters on the host. Torch's optimizers have them unless they are capturable or fused."""
    if optimizer is None:
        return set()
    on_host: set[int] = set()
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            continue
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, torch.Tensor):
                on_host.add(id(step))
    return on_host


# Replaces calls of the user's program that name the GPU, while CPU tensors stand for those of the card.
#
# `torch.autocast("cuda")` then applies to the CPU tensors, so that the advisor sees the program's mixed precision.
# `torch.cuda.synchronize()` is counted, and does nothing else if CPU tensors stand for the card.


@contextlib.contextmanager
def card_calls(*, stands_for_card: bool, on_synchronize: Callable[[], None]) -> Iterator[None]:
    """A context in which those calls are replaced. `stands_for_card`: CPU tensors stand for those of the card."""
    initialize, synchronize = autocast.__init__, torch.cuda.synchronize

    def initialize_for_card(
        context: autocast, device_type: str, dtype: torch.dtype | None = None, **options: Any
    ) -> None:
        if stands_for_card and device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        initialize(context, device_type, dtype, **options)

    def count_synchronize(device: Any = None) -> None:
        on_synchronize()
        if not stands_for_card:
            synchronize(device)

    autocast.__init__ = initialize_for_card  # type: ignore[method-assign, assignment]
    torch.cuda.synchronize = count_synchronize
    try:
        yield
    finally:
        autocast.__init__, torch.cuda.synchronize = initialize, synchronize  # type: ignore[method-assign]


# Finds biases that a batch norm cancels, in the graph of the step, so that functions count as well as modules.
#
# Only a batch norm in training reads the output of the convolution or product, and only that operation reads the bias.
# The batch norm subtracts the mean over the batch, and with it any constant.

# The index of the bias among the inputs of the node.
_BIAS_EDGE = {"ConvolutionBackward0": 2, "AddmmBackward0": 0}
_NORMS = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")


class NormBias(NamedTuple):
    """The ids of the two parameters; the caller knows their names. `norm_id` is 0 for a norm without a weight."""

    bias_id: int
    norm_id: int


def norm_biases(loss: torch.Tensor) -> Iterator[NormBias]:
    """Find the biases in the graph of `loss`. Call this before the backward pass, which frees the graph."""
    nodes, consumers = _graph(loss.grad_fn)
    for norm in nodes:
        if norm.name() not in _NORMS or not getattr(norm, "_saved_training", True):
            continue
        made_by = norm.next_functions[0][0]
        if made_by is None or consumers[made_by] != 1 or made_by.name() not in _BIAS_EDGE:
            continue
        bias = made_by.next_functions[_BIAS_EDGE[made_by.name()]][0]
        if bias is None or consumers[bias] != 1 or not hasattr(bias, "variable"):
            continue
        weight: Any = norm.next_functions[1][0]
        yield NormBias(id(bias.variable), id(weight.variable) if hasattr(weight, "variable") else 0)


def _graph(root: Any) -> tuple[list[Any], Counter[Any]]:
    """All nodes, and how many others read each. Python objects of nodes are created on access, and keep their identity
    only while they are held."""
    nodes, consumers, waiting = [], Counter[Any](), [root]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes.append(node)
        for following, _ in node.next_functions:
            if following is not None:
                consumers[following] += 1
                waiting.append(following)
    return nodes, consumers
