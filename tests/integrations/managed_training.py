"""Training loops of two processes whose optimizer's state is on the host, each run plain and in a session: jobs for
tests.integrations.ranks. Each returns the facts of `beside_plain`."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import vdnn
from tests.integrations.parallel_training import STEPS, Trouble, batches, blocks, parameters_of
from tests.runtime.rigs.side_by_side import same_bits
from vdnn.integrations.ranks import offload_together
from vdnn.runtime.training_state.optimizer_state import state_of

Named = list[tuple[str, torch.Tensor]]
Inside = Callable[[torch.optim.Optimizer], contextlib.AbstractContextManager[Any]]
Loop = Callable[[Inside], Named]
NARROW = vdnn.Limits(offload_window="4KiB", reload_window="4KiB")


def beside_plain(loop: Loop) -> dict[str, Any]:
    """Runs `loop` plain and in a session. `host_bytes` and `state_bytes` are those at the end of the session."""
    plain = loop(contextlib.nullcontext)
    facts: dict[str, Any] = {}

    @contextlib.contextmanager
    def inside(optimizer: torch.optim.Optimizer) -> Iterator[None]:
        session = vdnn.offload("vdnn-all", device="sim", min_bytes=0, limits=NARROW, optimizer=optimizer)
        with contextlib.closing(session), session:
            yield
            facts["host_bytes"] = state_of(optimizer).moved.host_bytes
            facts["state_bytes"] = _state_bytes(optimizer)

    ours = loop(inside)
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for _, value in ours)).hexdigest()
    differing = [name for (name, one), (_, other) in zip(plain, ours, strict=True) if not same_bits(one, other)]
    return {"differing": differing, "digest": digest, **facts}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [one for state in optimizer.state.values() for one in state.values() if one.dim()]
    return sum(_local(one).nbytes for one in tensors)


def trained(model: nn.Module, rank: int, inside: Inside, micro_batches: int = 1) -> Named:
    """Trains by AdamW with clipping. Without `no_sync`, each micro-batch is reduced."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with inside(optimizer):
        for index, x in enumerate(batches(rank, micro_batches * STEPS)):
            model(x).square().mean().backward()
            if index % micro_batches == micro_batches - 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        state = [
            (f"{at} {name}", one) for at, held in enumerate(optimizer.state.values()) for name, one in held.items()
        ]
        found = [(name, _local(one).clone()) for name, one in state]
    return [*parameters_of(model), *found]


def ddp(rank: int, micro_batches: int) -> dict[str, Any]:
    def loop(inside: Inside) -> Named:
        torch.manual_seed(0)
        return trained(DistributedDataParallel(blocks()), rank, inside, micro_batches)

    return beside_plain(loop)


def sharded(kind: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    model = blocks()
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if kind == "cpu offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if kind == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, reshard_after_forward=kind != "no reshard", **options)
    fully_shard(model, **options)
    return model


def fsdp2(rank: int, kind: str, micro_batches: int = 1) -> dict[str, Any]:
    return beside_plain(lambda inside: trained(sharded(kind), rank, inside, micro_batches))


def fsdp2_with_its_own_offload(rank: int) -> str:
    """Returns what the refusal says. Nothing has moved."""
    model = sharded("cpu offload")
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        vdnn.offload("vdnn-all", device="sim", model=model, optimizer=optimizer)
    except vdnn.VdnnError as error:
        return str(error)
    return "not refused"


def fsdp2_on_another_device_than_its_mesh(rank: int) -> str:
    """Stands in for a mesh of GPUs with shards on the CPU. Without model=, the parameters tell."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    mesh = next(iter(model.parameters())).device_mesh  # type: ignore[attr-defined]
    mesh._device_type = "cuda"
    try:
        vdnn.offload("vdnn-all", device="sim", optimizer=optimizer)
    except vdnn.VdnnError as error:
        return str(error)
    finally:
        mesh._device_type = "cpu"
    return "not refused"


def fsdp2_saved_and_loaded(rank: int, folder: str) -> dict[str, Any]:
    """Saves by torch.distributed.checkpoint inside a session, and goes on from the file, and from a deep copy."""

    def loop(inside: Inside) -> Named:
        model = sharded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with inside(optimizer):
            for index, x in enumerate(batches(rank, 9)):
                if index == 3:
                    save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder)
                if index == 6:
                    state = get_optimizer_state_dict(model, optimizer)
                    load(state, checkpoint_id=folder)
                    set_optimizer_state_dict(model, optimizer, state)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            copied = copy.deepcopy(optimizer.state_dict())["state"]
            found = [(f"{at} {name}", _local(one)) for at, held in copied.items() for name, one in held.items()]
        return [*parameters_of(model), *found]

    return beside_plain(loop)


def ddp_under_a_budget(rank: int) -> dict[str, Any]:
    """The ranks agree on a plan and follow it in another session, which takes the state over."""
    torch.manual_seed(0)
    plain = trained(DistributedDataParallel(blocks()), rank, contextlib.nullcontext)
    torch.manual_seed(0)
    with vdnn.VirtualMachine("titan-x", fake=False) as machine:
        model = DistributedDataParallel(blocks())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options: dict[str, Any] = {"min_bytes": 0, "limits": NARROW, "optimizer": optimizer}
        with offload_together("min", policy="prefix-cut", device=machine, **options) as ranks:
            for x in batches(rank):
                model(x).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                ranks.step()
            facts = {"host_bytes": state_of(optimizer).moved.host_bytes, "state_bytes": _state_bytes(optimizer)}
            is_planned = ranks.plan is not None
        ours = parameters_of(model)
        ranks.session.close()
    named = zip(plain, ours, strict=False)
    differing = [name for (name, one), (_, other) in named if not same_bits(one, other)]
    return {"differing": differing, "is_planned": is_planned, **facts}


def pipeline(rank: int) -> dict[str, Any]:
    """A stage under 1F1B: several forward passes are in flight, and one optimizer for each stage."""

    def loop(inside: Inside) -> Named:
        torch.manual_seed(0)
        whole = blocks()
        mine = whole[:2] if rank == 0 else whole[1:]
        stage = PipelineStage(mine, rank, dist.get_world_size(), torch.device("cpu"))
        pipe = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean())
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
        with inside(optimizer):
            for x in batches(0):
                if rank == 0:
                    pipe.step(x)
                else:
                    pipe.step(target=x.flip(0), losses=[])
                optimizer.step()
                optimizer.zero_grad()
        return parameters_of(mine)

    return beside_plain(loop)


def one_raises_in_its_step(rank: int) -> None:
    """Rank 1 raises in the middle of a step of its optimizer, while rank 0 goes on to the next reduction."""
    torch.manual_seed(0)
    model = DistributedDataParallel(blocks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    with vdnn.offload("vdnn-all", device="sim", min_bytes=0, limits=NARROW, optimizer=optimizer):
        for step, x in enumerate(batches(rank)):
            model(x).square().mean().backward()
            if rank == 1 and step == 2:
                last = optimizer.param_groups[0]["params"][-1]
                last.grad = _Raises(last.grad)
            optimizer.step()
            optimizer.zero_grad()


class _Raises(torch.Tensor):
    """A gradient that cannot be used."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "lerp_":
            raise Trouble("this rank has had enough")
        return super().__torch_function__(function, types, args, kwargs or {})
