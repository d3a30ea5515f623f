"""The Trainer of transformers over several processes, plain and in sessions: a job for tests.integrations.ranks."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

Values = dict[str, torch.Tensor]


def train(rank: int, folder: str) -> dict[str, Any]:
    from vdnn.integrations.huggingface import OffloadCallback

    # The group already exists, but the library requires these variables.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")
    plain, _ = _trained(folder, [])
    callback = OffloadCallback(device="sim", min_bytes=0)
    ours, is_parallel = _trained(folder, [callback])
    assert callback.session is not None
    return {
        "differing": [name for name in plain if not torch.equal(plain[name], ours[name])],
        "digest": hashlib.sha256(b"".join(value.numpy().tobytes() for value in ours.values())).hexdigest(),
        "storages": callback.session.counters.storages,
        "is_parallel": is_parallel,
    }


def train_under_a_budget(rank: int, folder: str) -> dict[str, Any]:
    import vdnn
    from vdnn.integrations.huggingface import OffloadCallback

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")
    plain, _ = _trained(folder, [])
    with vdnn.VirtualMachine("titan-x", fake=False) as machine:
        callback = OffloadCallback(policy="prefix-cut", budget="min", device=machine, min_bytes=0)
        ours, is_parallel = _trained(folder, [callback])
    plan = None if callback.session is None else callback.session.plan
    assert plan is not None
    return {
        "differing": [name for name in plain if not torch.equal(plain[name], ours[name])],
        "plan": hashlib.sha256(repr(plan).encode()).hexdigest(),
        "offloaded_bytes": plan.offloaded_bytes,
        "is_parallel": is_parallel,
    }


def _trained(folder: str, callbacks: list[Any]) -> tuple[Values, bool]:
    import transformers

    from tests.integrations.test_huggingface import arguments, gpt, texts, values_of

    trainer = transformers.Trainer(gpt(), arguments(Path(folder)), train_dataset=texts(), callbacks=callbacks)
    trainer.train()
    return values_of(trainer.model), isinstance(trainer.model_wrapped, DistributedDataParallel)
