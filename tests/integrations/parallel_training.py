"""Trainings over several processes, each run plain and in a session: jobs for tests.integrations.ranks.

A program trains inside of `inside(model, optimizer)`, and returns all that can differ, by name. In a session
activations leave, by moves or under a plan, and parts of the training's state do. `beside_plain` runs a program both
ways and returns facts: what differs in any bit, a digest of the whole parameters, and what has left the device.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import vdnn
from tests.runtime.rigs.side_by_side import alive, same_bits
from tests.runtime.training_state.ways import what_stays_changes
from vdnn.integrations.ranks import offload_together
from vdnn.runtime.session.session import Session
from vdnn.runtime.torch_internals.gradient_reads import native_gradient
from vdnn.runtime.training_state.optimizer_state import state_of
from vdnn.step.plan import Plan
from vdnn.step.timeline import Timeline

STEPS = 20
WIDTH = 16
BATCH = 128  # so large that activations, and not the optimizer, make the peak
TOKENS, HEADS = 16, 2
NARROW = vdnn.Limits(offload_window="4KiB", reload_window="4KiB")
ON_SIM: dict[str, Any] = {"policy": "vdnn-all", "device": "sim", "min_bytes": 0, "limits": NARROW}

Named = list[tuple[str, torch.Tensor]]
Inside = Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]]
Program = Callable[[int, Inside], Named]
Make = Callable[[], nn.Module]


# Models.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return out


def blocks(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(count)])


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


class Attention(nn.Module):
    """Attends from this rank's tokens to those of all ranks, as models do that gather keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys, values = (_all_gather(one(x).contiguous(), 1, dist.group.WORLD) for one in (self.k, self.v))
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q(x), keys, values))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        out: torch.Tensor = x + self.out(attended.transpose(1, 2).flatten(-2))
        return out


def attentions() -> nn.Sequential:
    return nn.Sequential(*[Attention() for _ in range(3)])


# torch before 2.13 has only the second name, at which later ones warn.
_NAMES = ("all_gather_single_autograd", "all_gather_tensor_autograd")
_all_gather: Any = next(
    getattr(_functional_collectives, name) for name in _NAMES if hasattr(_functional_collectives, name)
)


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def replicated(make: Make = blocks, hook: Any = None, **options: Any) -> nn.Module:
    model = DistributedDataParallel(make(), **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


def low_rank() -> nn.Module:
    """DDP whose gradients are sent as low-rank factors from the third step on. All are in one bucket: torch 2.13's hook
    waits for collectives on gloo's two threads, so that a second bucket hangs or mixes up the ranks' collectives, also
    without a session."""
    model = DistributedDataParallel(blocks(), bucket_cap_mb=25)
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook)
    return model


def sharded(kind: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    model = blocks()
    options: dict[str, Any] = {"mesh": mesh()}
    if kind == "cpu offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if kind == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, reshard_after_forward=kind != "no reshard", **options)
    fully_shard(model, **options)
    return model


def sharded_by_fsdp1() -> nn.Module:
    """The older FSDP, with one flat parameter for each block."""
    return nn.Sequential(*[FullyShardedDataParallel(block, device_id=torch.device("cpu")) for block in blocks()])


def tensor_parallel() -> nn.Module:
    model = blocks()
    for block in model:
        parallelize_module(block, mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sequence_parallel() -> nn.Module:
    """Norms, residual sums and activations are sharded over the tokens. Between the blocks they are DTensors."""
    model, tokens = blocks(), Shard(1)
    for block in model:
        spread = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=tokens),
            "down": RowwiseParallel(output_layouts=tokens, use_local_output=False),
        }
        parallelize_module(block, mesh(), spread)
    parallelize_module(model[0], mesh(), PrepareModuleInput(input_layouts=tokens, desired_input_layouts=tokens))
    parallelize_module(model[-1], mesh(), PrepareModuleOutput(output_layouts=tokens, desired_output_layouts=tokens))
    return model


def half_frozen(make: Make) -> nn.Module:
    model = make()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


# Data.


def batches(rank: int, count: int = STEPS) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield torch.randn(BATCH, WIDTH, generator=generator)


def parts_of_sequences(rank: int, count: int) -> Iterator[torch.Tensor]:
    """All ranks have the same sequences, and each yields its own tokens of them."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        whole = torch.randn(BATCH // TOKENS, TOKENS, WIDTH, generator=generator)
        yield whole.chunk(dist.get_world_size(), 1)[rank].contiguous()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameters_of(module: nn.Module) -> Named:
    """The whole parameters, however they are sharded."""
    values = [(name, one.detach()) for name, one in module.named_parameters()]
    whole = [(name, one.full_tensor() if isinstance(one, DTensor) else one) for name, one in values]
    return [(name, one.clone().cpu()) for name, one in whole]


# Programs.


def trained(
    make: Make,
    rank: int,
    inside: Inside,
    micro_batches: int = 1,
    *,
    syncs: bool = False,
    clips: bool = True,
    data: Any = batches,
) -> Named:
    """Trains by AdamW with clipping, and reads gradients now and then. Micro-batches but the last of a step are not
    reduced, if the model can do so, unless it `syncs`."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    with inside(model, optimizer) as after_backward:
        for index, x in enumerate(data(rank, micro_batches * STEPS)):
            is_last = index % micro_batches == micro_batches - 1
            with contextlib.nullcontext() if is_last or syncs else _unreduced(model):
                model(x).square().mean().backward()
            if after_backward is not None:
                after_backward()
            if is_last:
                if index % 3 == 0 and clips:
                    seen.append(local(nn.utils.clip_grad_norm_(model.parameters(), 0.5)).clone())
                gradients = [one.grad for one in model.parameters() if one.grad is not None] if index % 5 == 0 else []
                seen += [local(one).clone() for one in gradients]
                del gradients
                optimizer.step()
                optimizer.zero_grad()
        seen += [local(one).clone() for state in optimizer.state.values() for one in state.values()]
    return [*parameters_of(model), *((f"seen {at}", one) for at, one in enumerate(seen))]


def _unreduced(model: nn.Module) -> AbstractContextManager[Any]:
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


def saved_and_loaded(rank: int, inside: Inside) -> Named:
    """Saves by torch.distributed.checkpoint inside a session, and goes on from the file, and from a deep copy."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    folders: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    with inside(model, optimizer):
        for index, x in enumerate(batches(rank, 9)):
            if index == 3:
                save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folders[0])
            if index == 6:
                state = get_optimizer_state_dict(model, optimizer)
                load(state, checkpoint_id=folders[0])
                set_optimizer_state_dict(model, optimizer, state)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        copied = copy.deepcopy(optimizer.state_dict())["state"]
        found = [(f"{at} {name}", local(one)) for at, held in copied.items() for name, one in held.items()]
    return [*parameters_of(model), *found]


def pipeline(rank: int, inside: Inside, kind: Any = Schedule1F1B, steps: int = STEPS) -> Named:
    """Runs four micro-batches: under 1F1B a stage has several forward passes in flight. Each stage has an optimizer."""
    torch.manual_seed(0)
    whole = blocks()
    mine = whole[:2] if rank == 0 else whole[1:]
    stage = PipelineStage(mine, rank, dist.get_world_size(), torch.device("cpu"))
    pipe = kind(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean())
    return _run_pipe(rank, inside, pipe, mine, steps)


def _run_pipe(rank: int, inside: Inside, pipe: Any, mine: nn.Module, steps: int) -> Named:
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
    with inside(mine, optimizer):
        for x in batches(0, steps):
            if rank == 0:
                pipe.step(x)
            else:
                pipe.step(target=x.flip(0), losses=[])
            optimizer.step()
            optimizer.zero_grad()
    return parameters_of(mine)


def interleaved(rank: int, inside: Inside) -> Named:
    """Gives each rank two stages that do not follow each other, as interleaved 1F1B does."""
    torch.manual_seed(0)
    whole, count = blocks(4), dist.get_world_size()
    mine = nn.ModuleList([whole[rank], whole[rank + count]])
    stages: list[Any] = [
        PipelineStage(one, rank + at * count, 2 * count, torch.device("cpu")) for at, one in enumerate(mine)
    ]
    pipe = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean())
    return _run_pipe(rank, inside, pipe, mine, STEPS)


def sharded_optimizer(rank: int, inside: Inside) -> Named:
    """Trains by DDP, where each rank has the optimizer's state of its part of the parameters: ZeRO, stage 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.13's own torch.jit.script
        from torch.distributed.optim import ZeroRedundancyOptimizer
    torch.manual_seed(0)
    model = replicated()
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    with inside(model, optimizer):
        for x in batches(rank):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return parameters_of(model)


def _of(make: Make, *arguments: Any, **options: Any) -> Program:
    return lambda rank, inside: trained(make, rank, inside, *arguments, **options)


def _same_data(rank: int, count: int) -> Iterator[torch.Tensor]:
    return batches(0, count)


PROGRAMS: dict[str, Program] = {
    "DDP": _of(replicated),
    "DDP, micro-batches": _of(replicated, 3, syncs=True),
    "DDP, no_sync": _of(partial(replicated, find_unused_parameters=True), 2),
    "DDP, static graph": _of(partial(replicated, static_graph=True)),
    "DDP, checkpoints": _of(partial(replicated, partial(Checkpointed, use_reentrant=False)), 2),
    "DDP, reentrant": _of(partial(replicated, partial(Checkpointed, use_reentrant=True), static_graph=True)),
    "DDP, small buckets": _of(partial(replicated, bucket_cap_mb=0.002), 2),
    "DDP, PowerSGD": _of(low_rank, 2),
    "DDP, fp16": _of(partial(replicated, hook=fp16_compress_hook), 2),
    "DDP, bucket view": _of(partial(replicated, gradient_as_bucket_view=True)),
    "DDP, unused": _of(partial(replicated, Branches, find_unused_parameters=True), 2),
    "DDP, frozen": _of(lambda: replicated(partial(half_frozen, blocks))),
    "FSDP2": _of(sharded),
    "FSDP2, micro-batches": _of(sharded, 4),
    "FSDP2, no reshard": _of(partial(sharded, "no reshard")),
    "FSDP2, cpu offload": _of(partial(sharded, "cpu offload")),
    "FSDP2, mixed precision": _of(partial(sharded, "mixed precision")),
    "FSDP2, frozen": _of(partial(half_frozen, sharded)),
    "FSDP2, saved and loaded": saved_and_loaded,
    "FSDP1": _of(sharded_by_fsdp1),
    # Torch clips no DTensors beside plain tensors.
    "tensor parallel": _of(tensor_parallel, data=_same_data, clips=False),
    "sequence parallel": _of(sequence_parallel, data=parts_of_sequences),
    "context parallel": _of(
        lambda: replicated(lambda: nn.Sequential(*[Attention() for _ in range(3)])), data=parts_of_sequences
    ),
    "1F1B": pipeline,
    "GPipe": partial(pipeline, kind=ScheduleGPipe),
    "interleaved 1F1B": interleaved,
    "DDP, ZeRO 1": sharded_optimizer,
}


# Sessions.


@contextlib.contextmanager
def moving(how: str) -> Iterator[Session]:
    """A session: "moves" offloads everything, and another name plans for the least memory by that policy."""
    if how == "moves":
        with vdnn.offload(
            "vdnn-all", device="sim", min_bytes=0, limits=vdnn.Limits(offload_window=1, reload_window="4KiB")
        ) as session:
            yield session
    else:
        with (
            vdnn.VirtualMachine("titan-x", fake=False) as machine,
            vdnn.offload(how, budget="min", device=machine, min_bytes=0) as session,
        ):
            yield session
    left = alive(session)
    session.close()
    assert not left, left


# What of the training's state leaves; activations leave by moves in all of them.
STATES: dict[str, dict[str, Any]] = {
    "state": {},
    "gradients": {"gradients": True},
    "frozen": {"parameters": "frozen", "gradients": True},
    "all": {"parameters": "all", "gradients": True},
}
# As "gradients", but after each step others of the gradients and states stay on the device: on each rank other ones.
SOME_STAY = "some stay"
MOVES, PLANS, AUTO = "moves", "prefix-cut", "auto"


def nowhere(model: nn.Module, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def beside_plain(rank: int, program: str, way: str) -> dict[str, Any]:
    """`stayed`: the most gradients that were on the device behind a backward."""
    plain = PROGRAMS[program](rank, nowhere)
    facts: dict[str, Any] = {"stayed": 0}

    @contextlib.contextmanager
    def inside(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None] | None]:
        if way == SOME_STAY:
            managed = vdnn.offload(**ON_SIM, optimizer=optimizer, **STATES["gradients"])
            with what_stays_changes(rank) as stayed, contextlib.closing(managed) as session, session:
                yield lambda: facts.update(stayed=max(facts["stayed"], _on_the_device(model)))
                facts["some_stayed"] = sum(stayed)
        elif way not in STATES:
            with moving(way) as session:
                yield None
        else:
            given = {"optimizer": optimizer, **STATES[way], **({"model": model} if "parameters" in STATES[way] else {})}
            with contextlib.closing(vdnn.offload(**ON_SIM, **given)) as session, session:
                yield lambda: facts.update(stayed=max(facts["stayed"], _on_the_device(model)))
                state = state_of(optimizer)
                facts["most_gradient_bytes"] = state.gradients.most_bytes
                facts["host_bytes"], facts["state_bytes"] = state.moved.host_bytes, state_bytes(optimizer)
        facts.update(facts_of(session))

    ours = PROGRAMS[program](rank, inside)
    assert [name for name, _ in plain] == [name for name, _ in ours]
    facts["differing"] = [
        name for (name, one), (_, other) in zip(plain, ours, strict=True) if not same_bits(one, other)
    ]
    whole = [value.numpy().tobytes() for name, value in ours if name.endswith(("weight", "bias"))]
    return {**facts, "digest": hashlib.sha256(b"".join(whole)).hexdigest()}


def differing(plain: Named, ours: Named) -> list[str]:
    return [name for (name, one), (_, other) in zip(plain, ours, strict=True) if not same_bits(one, other)]


def facts_of(session: Session) -> dict[str, Any]:
    return {
        "storages": session.counters.storages + session.counters.discarded,
        "storage_bytes": session.counters.storage_bytes,
        "planned_bytes": 0 if session.plan is None else session.plan.offloaded_bytes,
        "kept": {reason.name: count for reason, count in session.counters.kept.items()},
        "steps": session.num_steps,
        "report": session.report(),
    }


def _on_the_device(model: nn.Module) -> int:
    return sum(native_gradient(one) is not None for one in model.parameters())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [one for state in optimizer.state.values() for one in state.values() if one.dim()]
    return sum(local(one).nbytes for one in tensors)


# Plans.


def pipeline_as_planned(rank: int) -> tuple[Plan, Timeline, Timeline]:
    """Trains under 1F1B with "auto" at the least memory. Returns the plan, and the last step as predicted and
    measured. In the last stage each micro-batch is a step."""
    with (
        vdnn.VirtualMachine("p100", fake=False) as machine,
        vdnn.offload("auto", budget="min", device=machine, min_bytes=0, measure=True) as session,
    ):
        pipeline(rank, nowhere, steps=6)
    planned, plan, measured = session._engine.steps.predicted(), session.plan, session.timeline
    assert planned is not None
    assert plan is not None
    assert measured is not None
    return plan, planned[1], measured


def ddp_under_a_budget(rank: int) -> dict[str, Any]:
    """The ranks agree on a plan and follow it in another session, which takes the state over."""

    def run(ranks: Any, optimizer: torch.optim.Optimizer, model: nn.Module) -> Named:
        for x in batches(rank):
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if ranks is not None:
                ranks.step()
        return parameters_of(model)

    def made() -> tuple[torch.optim.Optimizer, nn.Module]:
        torch.manual_seed(0)
        model = replicated()
        return torch.optim.AdamW(model.parameters(), lr=1e-2), model

    plain = run(None, *made())
    with vdnn.VirtualMachine("titan-x", fake=False) as machine:
        optimizer, model = made()
        options: dict[str, Any] = {"min_bytes": 0, "limits": NARROW, "optimizer": optimizer}
        with offload_together("min", policy="prefix-cut", device=machine, **options) as ranks:
            ours = run(ranks, optimizer, model)
            facts = {"host_bytes": state_of(optimizer).moved.host_bytes, "state_bytes": state_bytes(optimizer)}
            facts["is_planned"] = ranks.plan is not None
        ranks.session.close()
    return {"differing": differing(plain, ours), **facts}


# Refusals, and what the program holds.


def refused(rank: int, kind: str) -> str:
    """Returns the refusal of optimizer=. "another device" stands in for a mesh of GPUs with shards on the CPU: without
    model=, the parameters tell."""
    model = sharded("cpu offload" if kind == "cpu offload" else "plain")
    optimizer = torch.optim.AdamW(model.parameters())
    given: dict[str, Any] = {"model": model} if kind == "cpu offload" else {}
    device_mesh: Any = next(iter(model.parameters())).device_mesh  # type: ignore[attr-defined]
    own = device_mesh._device_type
    try:
        if kind != "cpu offload":
            device_mesh._device_type = "cuda"
        vdnn.offload("vdnn-all", device="sim", optimizer=optimizer, **given)
    except vdnn.VdnnError as error:
        return str(error)
    finally:
        device_mesh._device_type = own
    return "not refused"


def all_parameters_refused(rank: int) -> list[str]:
    """Returns the errors of parameters="all" under DDP and FSDP2, and the report of a session that was given the module
    inside of DDP, which holds the memory of its parameters."""
    said = []
    inner = blocks()
    wrapped = DistributedDataParallel(inner)
    for model in (wrapped, sharded(), inner):
        optimizer = torch.optim.AdamW(model.parameters())
        before = [local(one).detach().clone() for one in model.parameters()]
        try:
            with vdnn.offload(model=model, optimizer=optimizer, **ON_SIM, **STATES["all"]) as session:
                wrapped(torch.ones(4, WIDTH))
            said.append(session.report())
        except vdnn.VdnnError as error:
            said.append(str(error))
        assert all(same_bits(one, local(other)) for one, other in zip(before, model.parameters(), strict=True))
    return said


def a_held_shard(rank: int) -> list[bool]:
    """A program holds what shares memory with the gradient of a shard, and writes to it."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    first = next(model.parameters())
    with vdnn.offload(optimizer=optimizer, gradients=True, **ON_SIM):
        model(torch.ones(4, WIDTH)).square().mean().backward()
        is_away = native_gradient(first) is None
        held = first.grad.to_local()  # type: ignore[union-attr]
        [one.grad for one in model.parameters()]  # reads let those leave that were read before
        held.zero_()
        return [is_away, not local(first.grad).any()]  # type: ignore[arg-type]


def context_parallel_of_torch(rank: int) -> str:
    """Torch's context_parallel dispatches to attention kernels that only CUDA has. Returns torch's own error message on
    the CPU, without vdnn."""
    q, k, v = (torch.randn(1, HEADS, TOKENS, WIDTH) for _ in range(3))
    try:
        with context_parallel(mesh(), buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    except NotImplementedError as error:
        return str(error)
    return ""


# Jobs that fail.


class Trouble(RuntimeError):
    pass


def _raise(*_: object) -> None:
    raise Trouble("this rank has had enough")


class _Raises(torch.Tensor):
    """A gradient that cannot be used."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "lerp_":
            _raise()
        return super().__torch_function__(function, types, args, kwargs or {})


def one_raises(rank: int, where: str, way: str, model: str = "DDP") -> None:
    """Rank 1 raises in its third step, `where` says, while rank 0 goes on to the next reduction."""
    torch.manual_seed(0)
    net = replicated() if model == "DDP" else sharded()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    given: dict[str, Any] = {} if way == MOVES else {"optimizer": optimizer, **STATES[way]}
    with vdnn.offload(**ON_SIM, **given):
        for step, x in enumerate(batches(rank)):
            out = net(x)
            fails = rank == 1 and step == 2
            if fails and where == "forward":
                _raise()
            if fails and where == "backward":
                out.register_hook(_raise)
            out.square().mean().backward()
            if fails and where == "step":
                last = optimizer.param_groups[0]["params"][-1]
                last.grad = _Raises(last.grad)
            optimizer.step()
            optimizer.zero_grad()
