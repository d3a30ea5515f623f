"""Trains one small GPT twice from the same state on the same text: without vdnn, and under a budget.

The text is the documentation of this repository, byte by byte. Both runs call the same loop; the run under the budget
calls it inside a session, and nothing else differs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.demo.devices import DemoDevice, Measured
from benchmarks.models.gpt import Gpt, GptShape
from benchmarks.vdnn_paper.identical_gradients import same_bits
from vdnn import Session
from vdnn.step.saved_step import SavedStep

TEXT = Path(__file__).resolve().parents[2] / "docs"
BYTES = 256
BUDGET_SHARE = 0.5  # of the peak without vdnn
STEP_NAME = "gpt"


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the model, the batch and the run. The plan that lasts is made from the second step, and
    followed from the third on."""

    layers: int
    width: int
    heads: int
    tokens: int
    batch: int
    steps: int

    @property
    def shape(self) -> GptShape:
        return GptShape(BYTES, self.tokens, self.layers, self.width, self.heads)


CPU_SIZE = Size(layers=4, width=128, heads=4, tokens=128, batch=16, steps=12)
# This size is larger, so that activations take more memory than the workspaces of cuBLAS.
GPU_SIZE = Size(layers=8, width=512, heads=8, tokens=512, batch=32, steps=12)


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """`measured` has an entry for each step, or None if the step was not measured. `tensors` are the parameters and
    their gradients of the last step."""

    losses: tuple[float, ...]
    measured: tuple[Measured | None, ...]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Both runs. `planned_from` is the first step that follows the plan, counted from 0."""

    size: Size
    device_name: str
    shown_name: str
    cell_place: str
    clock: str
    budget_bytes: int
    plain: TrainingRun
    ours: TrainingRun
    planned_from: int
    step: SavedStep
    session_report: str

    @property
    def different_steps(self) -> tuple[int, ...]:
        """Steps whose losses differ in any bit, counted from 0."""
        pairs = zip(self.plain.losses, self.ours.losses, strict=True)
        return tuple(index for index, (plain, ours) in enumerate(pairs) if plain.hex() != ours.hex())

    @property
    def different_tensors(self) -> tuple[str, ...]:
        """Names of parameters and gradients that differ in any bit after the last step."""
        ours = self.ours.tensors
        return tuple(name for name, found in self.plain.tensors.items() if not same_bits([found], [ours[name]]))

    @property
    def is_finite(self) -> bool:
        runs = (self.plain, self.ours)
        return all(math.isfinite(loss) for run in runs for loss in run.losses) and all(
            bool(tensor.isfinite().all()) for run in runs for tensor in run.tensors.values()
        )

    @property
    def plain_peak_bytes(self) -> int:
        return _peak(self.plain.measured)

    @property
    def planned_peak_bytes(self) -> int:
        """The highest peak of the steps that followed the plan."""
        return _peak(self.ours.measured[self.planned_from :])

    @property
    def holds_budget(self) -> bool:
        return 0 < self.planned_peak_bytes <= self.budget_bytes

    @property
    def is_right(self) -> bool:
        return not self.different_steps and not self.different_tensors and self.is_finite and self.holds_budget


def train_side_by_side(
    make_device: Callable[[], DemoDevice], size: Size, on_step: Callable[[str], None] = lambda doing: None
) -> SideBySide:
    """Trains on two devices, one for each run, so that neither run counts the other's memory."""
    plain = _train_plain(make_device(), size, on_step)
    device = make_device()
    budget_bytes = int(BUDGET_SHARE * _peak(plain.measured))
    ours, planned_from, session = _train_under(device, size, budget_bytes, on_step)
    return SideBySide(
        size=size,
        device_name=device.name,
        shown_name=device.shown_name,
        cell_place=device.cell_place,
        clock=device.clock,
        budget_bytes=budget_bytes,
        plain=plain,
        ours=ours,
        planned_from=planned_from,
        step=SavedStep(STEP_NAME, session.recording, session.plan, None, session.timeline),
        session_report=session.report(),
    )


def _train_plain(device: DemoDevice, size: Size, on_step: Callable[[str], None]) -> TrainingRun:
    measured: list[Measured | None] = []

    def begin(step: int) -> None:
        on_step(f"step {step + 1} of {size.steps} without vdnn")
        device.begin_step()

    with device.entered():
        losses, tensors = _train(device.torch_device, size, begin, lambda: measured.append(device.end_step()))
    return TrainingRun(losses, tuple(measured), tensors)


def _train_under(
    device: DemoDevice, size: Size, budget_bytes: int, on_step: Callable[[str], None]
) -> tuple[TrainingRun, int, Session]:
    measured: list[Measured | None] = []
    followed: list[bool] = []

    with device.entered(), contextlib.ExitStack() as stack:
        session = stack.enter_context(device.session(budget_bytes))

        def begin(step: int) -> None:
            on_step(f"step {step + 1} of {size.steps} under the budget")
            followed.append(session.plan is not None)

        def end() -> None:
            timeline = session.timeline
            measured.append(None if timeline is None else Measured(timeline.peak_bytes, timeline.step_ns))

        losses, tensors = _train(device.torch_device, size, begin, end)
    planned_from = followed.index(True) if True in followed else size.steps
    return TrainingRun(losses, tuple(measured), tensors), planned_from, session


def _train(
    device: torch.device, size: Size, begin: Callable[[int], None], end: Callable[[], None]
) -> tuple[tuple[float, ...], dict[str, torch.Tensor]]:
    """The training loop, which does not use vdnn."""
    torch.manual_seed(0)
    model = _initialized(Gpt(size.shape)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = text_of(TEXT)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(size.steps):
        tokens = _batch(text, size, generator).to(device)
        begin(step)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        end()
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach().cpu().clone()
        if parameter.grad is not None:
            tensors[f"gradient of {name}"] = parameter.grad.cpu().clone()
    return tuple(losses), tensors


def _initialized(model: Gpt) -> Gpt:
    """Initializes the model as GPT-2 does. The head shares the embedding's matrix, which torch by default initializes
    with 50 times the standard deviation."""
    for embedding in (model.words, model.places):
        torch.nn.init.normal_(embedding.weight, std=0.02)
    return model


def text_of(folder: Path) -> torch.Tensor:
    """Returns the pages of a folder as bytes, in the order of their names."""
    pages = b"".join(page.read_bytes() for page in sorted(folder.glob("*.md")))
    return torch.frombuffer(bytearray(pages), dtype=torch.uint8)


def _batch(text: torch.Tensor, size: Size, generator: torch.Generator) -> torch.Tensor:
    """Returns random stretches of the text. Each is one token longer than the model reads, because the last token is
    only predicted."""
    begins = torch.randint(len(text) - size.tokens, (size.batch,), generator=generator).tolist()
    return torch.stack([text[begin : begin + size.tokens + 1] for begin in begins]).long()


def _peak(measured: tuple[Measured | None, ...]) -> int:
    return max((one.peak_bytes for one in measured if one is not None), default=0)
