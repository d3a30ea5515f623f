"""Training loops of two processes whose gradients are on the host between backward and the step, each run plain and in
a session: jobs for tests.integrations.ranks. Each runs several kinds and returns facts by kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import vdnn
from tests.integrations.managed_training import NARROW, _local, sharded
from tests.integrations.parallel_training import STEPS, WIDTH, Block, Trouble, batches, blocks, parameters_of
from tests.runtime.rigs.side_by_side import same_bits
from vdnn.runtime.torch_internals.gradient_reads import native_gradient
from vdnn.runtime.training_state.optimizer_state import state_of

Named = list[tuple[str, torch.Tensor]]
AfterBackward = Callable[[torch.optim.Optimizer], None]
ON_SIM: dict[str, Any] = {"policy": "vdnn-all", "device": "sim", "min_bytes": 0, "limits": NARROW, "gradients": True}
Make = Callable[[], nn.Module]


class Branches(nn.Module):
    """Uses one of two blocks in each call, so that the other one has no gradient in it."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.first, self.second = Block(), Block(), Block()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = (self.first if self.calls % 2 else self.second)(self.always(x))
        return out


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.use_reentrant = blocks(), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def trained(make: Make, rank: int, inside: Any, micro_batches: int = 1) -> Named:
    """Trains by AdamW with clipping. Micro-batches but the last of a step are not reduced, if the model can do so."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    with inside(model, optimizer) as after_backward:
        for index, x in enumerate(batches(rank, micro_batches * STEPS)):
            is_last = index % micro_batches == micro_batches - 1
            with contextlib.nullcontext() if is_last else _unreduced(model):
                model(x).square().mean().backward()
            if after_backward is not None:
                after_backward()
            if is_last:
                if index % 3 == 0:
                    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                gradients = [one.grad for one in model.parameters() if one.grad is not None] if index % 5 == 0 else []
                norms += [_local(one).clone() for one in gradients]
                del gradients
                optimizer.step()
                optimizer.zero_grad()
        held = [one for state in optimizer.state.values() for one in state.values()]
        found = [*norms, *(_local(one).clone() for one in held)]
    return [*parameters_of(model), *((str(at), _local(one)) for at, one in enumerate(found))]


def _unreduced(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


def beside_plain(make: Make, rank: int, micro_batches: int = 1) -> dict[str, Any]:
    """`stayed`: the most gradients that were on the device behind a backward. `most_bytes`: of gradients, on the
    host."""
    plain = trained(make, rank, lambda *_: contextlib.nullcontext(), micro_batches)
    facts: dict[str, Any] = {"stayed": 0}

    @contextlib.contextmanager
    def inside(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
        def count() -> None:
            stayed = sum(native_gradient(one) is not None for one in model.parameters())
            facts["stayed"] = max(facts["stayed"], stayed)

        session = vdnn.offload(optimizer=optimizer, **ON_SIM)
        with contextlib.closing(session), session:
            yield count
            facts["most_bytes"] = state_of(optimizer).gradients.most_bytes

    ours = trained(make, rank, inside, micro_batches)
    differing = [name for (name, one), (_, other) in zip(plain, ours, strict=True) if not same_bits(one, other)]
    return {"differing": differing, **facts}


def ddp(rank: int, is_more: bool) -> dict[str, dict[str, Any]]:
    def wrapped(make: Make = blocks, hook: Any = None, **options: Any) -> Make:
        def made() -> nn.Module:
            model = DistributedDataParallel(make(), **options)
            if hook is not None:
                model.register_comm_hook(None, hook)
            return model

        return made

    if is_more:
        return {
            "plain": beside_plain(wrapped(), rank),
            "static": beside_plain(wrapped(static_graph=True), rank),
            "checkpoint": beside_plain(wrapped(lambda: Checkpointed(use_reentrant=False)), rank, 2),
        }
    return {
        "small buckets": beside_plain(wrapped(bucket_cap_mb=0.002), rank, 2),
        # Not PowerSGD: over gloo, torch 2.13's hook hangs now and then on a busy machine, also without a session.
        "fp16": beside_plain(wrapped(hook=fp16_compress_hook), rank, 2),
        "bucket view": beside_plain(wrapped(gradient_as_bucket_view=True), rank),
        "unused": beside_plain(wrapped(Branches, find_unused_parameters=True), rank, 2),
        "reentrant": beside_plain(wrapped(lambda: Checkpointed(use_reentrant=True), static_graph=True), rank),
    }


def fsdp2(rank: int, is_more: bool) -> dict[str, dict[str, Any]]:
    kinds = ("plain", "no reshard") if is_more else ("mixed precision",)
    found = {kind: beside_plain(lambda kind=kind: sharded(kind), rank) for kind in kinds}  # type: ignore[misc]
    return found if is_more else {**found, "accumulating": beside_plain(sharded, rank, 2)}


def a_held_shard(rank: int) -> list[bool]:
    """A program holds what shares memory with the gradient of a shard, and writes to it."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    first = next(model.parameters())
    with vdnn.offload(optimizer=optimizer, **ON_SIM):
        model(torch.ones(4, WIDTH)).square().mean().backward()
        is_away = native_gradient(first) is None
        held = first.grad.to_local()  # type: ignore[union-attr]
        [one.grad for one in model.parameters()]  # reads let those leave that were read before
        held.zero_()
        return [is_away, not _local(first.grad).any()]  # type: ignore[arg-type]


def pipeline(rank: int) -> dict[str, Any]:
    """A stage under 1F1B, whose parameters, gradients and state are all on the host."""

    def loop(is_managed: bool) -> tuple[Named, str]:
        torch.manual_seed(0)
        whole = blocks()
        mine = whole[:2] if rank == 0 else whole[1:]
        stage = PipelineStage(mine, rank, dist.get_world_size(), torch.device("cpu"))
        pipe = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean())
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
        given: dict[str, Any] = {"model": mine, "optimizer": optimizer, "parameters": "all"}
        session = vdnn.offload(**given, **ON_SIM) if is_managed else None
        with contextlib.nullcontext() if session is None else session:
            for x in batches(0):
                if rank == 0:
                    pipe.step(x)
                else:
                    pipe.step(target=x.flip(0), losses=[])
                optimizer.step()
                optimizer.zero_grad()
        report = "" if session is None else session.report()
        if session is not None:
            session.close()
        return parameters_of(mine), report

    plain, (ours, report) = loop(False)[0], loop(True)
    differing = [name for (name, one), (_, other) in zip(plain, ours, strict=True) if not same_bits(one, other)]
    return {"differing": differing, "report": report}


def frozen(rank: int) -> dict[str, dict[str, Any]]:
    """Frozen parameters, state and gradients are on the host under DDP; under FSDP2 frozen shards stay."""

    def half(make: Make) -> nn.Module:
        model = make()
        model[0].requires_grad_(False)  # type: ignore[index]
        return model

    def run(make: Make) -> dict[str, Any]:
        plain = trained(make, rank, lambda *_: contextlib.nullcontext())
        facts: dict[str, Any] = {}

        @contextlib.contextmanager
        def inside(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
            with vdnn.offload(model=model, optimizer=optimizer, parameters="frozen", **ON_SIM) as session:
                yield None
            facts["report"] = session.report()
            session.close()

        ours = trained(make, rank, inside)
        differing = [name for (name, one), (_, other) in zip(plain, ours, strict=True) if not same_bits(one, other)]
        return {"differing": differing, **facts}

    return {
        "DDP": run(lambda: DistributedDataParallel(half(blocks))),
        "FSDP2": run(lambda: half(sharded)),
    }


def all_parameters_refused(rank: int) -> list[str]:
    """Returns the errors of parameters="all" under DDP and FSDP2, and the report of a session that was given the module
    inside of DDP, which holds the memory of its parameters."""
    said = []
    inner = blocks()
    wrapped = DistributedDataParallel(inner)
    for model in (wrapped, sharded(), inner):
        optimizer = torch.optim.AdamW(model.parameters())
        before = [_local(one).detach().clone() for one in model.parameters()]
        try:
            with vdnn.offload(model=model, optimizer=optimizer, parameters="all", **ON_SIM) as session:
                wrapped(torch.ones(4, WIDTH))
            said.append(session.report())
        except vdnn.VdnnError as error:
            said.append(str(error))
        assert all(same_bits(one, _local(other)) for one, other in zip(before, model.parameters(), strict=True))
    return said


def one_raises_with_its_gradients_away(rank: int, what: str) -> None:
    """Rank 1 raises in a backward, or between it and the step, while rank 0 goes on to the next reduction."""
    torch.manual_seed(0)
    model = DistributedDataParallel(blocks()) if what == "DDP" else sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with vdnn.offload(optimizer=optimizer, **ON_SIM):
        for step, x in enumerate(batches(rank)):
            out = model(x)
            if rank == 1 and step == 2:
                out.register_hook(_raise)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def _raise(gradient: torch.Tensor) -> None:
    raise Trouble("this rank has had enough")
