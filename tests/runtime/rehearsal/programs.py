"""Programs as people bring them to `vdnn plan`: one function for each way to make a model, its inputs and its step."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

WIDTH = 512


def net(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, **options), nn.Tanh(), nn.Linear(WIDTH, WIDTH, **options), nn.Tanh())


def perceptron(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """A model of eight layers: all that they make can be moved, and little of it recomputed."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers), torch.randn(batch, WIDTH)


def plain(batch: int) -> Any:
    return net(), torch.randn(batch, WIDTH)


def moved(batch: int) -> Any:
    return net().to("cuda"), torch.randn(batch, WIDTH).to(torch.device("cuda", 0), non_blocking=True)


def moved_by_method(batch: int) -> Any:
    return net().cuda(), torch.randn(batch, WIDTH).pin_memory().cuda(non_blocking=True)


def made_on_the_gpu(batch: int) -> Any:
    with torch.device("cuda"):
        return net(), torch.randn(batch, WIDTH)


def default_device(batch: int) -> Any:
    torch.set_default_device("cuda")
    try:
        return net(), torch.randn(batch, WIDTH)
    finally:
        torch.set_default_device(None)


def made_on_meta(batch: int) -> Any:
    with torch.device("meta"):
        return net(), torch.randn(batch, WIDTH)


def put_on_meta(batch: int) -> Any:
    return net().to("meta"), torch.randn(batch, WIDTH)


MADE_BEFORE = net()
MADE_BEFORE_INPUTS = torch.randn(4096, WIDTH)
with torch.device("meta"):
    META_BEFORE = net()


def made_before(batch: int) -> Any:
    return MADE_BEFORE, MADE_BEFORE_INPUTS[:batch]


def meta_before(batch: int) -> Any:
    return META_BEFORE, torch.randn(batch, WIDTH)


def copied(batch: int) -> Any:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(2))), torch.randn(batch, WIDTH)


class _Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(WIDTH)


def loader(batch: int) -> Any:
    return net(), torch.utils.data.DataLoader(_Rows(), batch_size=batch, num_workers=2, shuffle=False)


def generator(batch: int) -> Any:
    return net(), (torch.randn(batch, WIDTH) for _ in range(3))


def single(batch: int) -> Any:
    return net(), (torch.randn(batch, WIDTH),)


def named(batch: int) -> Any:
    return net(), {"input": torch.randn(batch, WIDTH)}


@dataclasses.dataclass
class Batch:
    rows: torch.Tensor
    name: str = "a batch"


class Takes(nn.Module):
    """Takes a dataclass, and returns its loss by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"output": self.inner(batch.rows)}


def dataclass(batch: int) -> Any:
    return Takes(), Batch(torch.randn(batch, WIDTH))


# Each of these has the parameters of net() and a batch of the same shape.
SAME_AS_PLAIN = (
    *(moved, moved_by_method, made_on_the_gpu, default_device, made_on_meta, put_on_meta, made_before, meta_before),
    *(copied, loader, generator, single, named, dataclass),
)


def halved(batch: int) -> Any:
    return net().half(), torch.randn(batch, WIDTH).half()


def converted(batch: int) -> Any:
    return net().to(torch.bfloat16), torch.randn(batch, WIDTH, dtype=torch.bfloat16)


def converted_on_the_gpu(batch: int) -> Any:
    return net().to("cuda", torch.bfloat16), torch.randn(batch, WIDTH, device="cuda", dtype=torch.bfloat16)


def with_optimizer(batch: int) -> Any:
    model = net()
    return model, torch.randn(batch, WIDTH), torch.optim.AdamW(model.parameters(), foreach=True)


def with_optimizer_and_loss(batch: int) -> Any:
    return *with_optimizer(batch), lambda output: output.square().mean()


class WholeStep:
    """A training step with all that people put into one."""

    def __init__(self, batch: int) -> None:
        self.model = nn.Sequential(*net(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 10)).to("cuda")
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        self.rows = torch.randn(batch, WIDTH, device="cuda")
        self.classes = torch.randint(10, (batch,)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.scaler = torch.amp.GradScaler("cuda")
        self.log: list[tuple[object, ...]] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            output = self.model(self.rows)
            loss = nn.functional.cross_entropy(output, self.classes)
        if not torch.isfinite(loss):
            raise ArithmeticError("the loss is not finite")
        if output.dtype is not torch.float16:
            raise TypeError("autocast is off")
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.average.update_parameters(self.model)
        self.scheduler.step()
        torch.cuda.synchronize()
        right = (output.argmax(1) == self.classes).float().mean()
        self.log.append(
            (loss.item(), norm.item(), right.item(), self.scaler.get_scale(), output.detach().cpu().numpy())
        )


class MadeBefore:
    """A step whose model and optimizer were made with data, before the rehearsal."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.rows = torch.randn(4096, WIDTH)

    def step(self) -> None:
        self.model(self.rows).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
