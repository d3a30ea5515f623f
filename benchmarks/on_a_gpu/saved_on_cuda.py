"""Part of `make gpu-proof`: compares what a GPU saves with what `vdnn.plan` predicts without one.

Each model's step is recorded on the GPU, and rehearsed on tensors without data with the table of
vdnn/runtime/rehearsal/cuda_shaped.py. Storages are compared as multisets of dtype and size. Those that only one of the
two has are listed with the operation that made them.
`--device cpu` uses real tensors of this CPU in place of the GPU's, to try the program. The table then differs from the
CPU in the masks of dropout.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import vdnn
from benchmarks.models import Workload, bert_large, densenet121, llama_8b, resnet50, unet, vgg16
from benchmarks.models.gpt import GptShape, gpt
from benchmarks.models.resnet import resnet
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn.hardware import load_profile
from vdnn.runtime.rehearsal.rehearsal import Staged, Subject, rehearse
from vdnn.step.recording import Recording

STEPS = 3  # one warms up, one is recorded, one more in case the graph of the first was still alive
MOST_NAMED = 6
HARDWARE = "h100"  # times are not compared, so any card will do


@dataclass(frozen=True, slots=True)
class SavedCase:
    """A model to compare. Storages smaller than `min_bytes` are not compared."""

    name: str
    make: Callable[[], Workload]
    autocast: bool = False
    min_bytes: int = 1 << 20


CASES = (
    SavedCase("ResNet-50 (32)", partial(resnet50, 32)),
    SavedCase("ResNet-50 AMP (32)", partial(resnet50, 32), autocast=True),
    SavedCase("VGG-16 (16)", partial(vgg16, 16)),
    SavedCase("DenseNet-121 (16)", partial(densenet121, 16)),
    SavedCase("U-Net (1)", partial(unet, 1)),
    SavedCase("BERT, 2 layers AMP (4)", partial(bert_large, 4, layers=2), autocast=True),
    SavedCase("GPT, 4 blocks AMP (4 x 1024)", partial(gpt, 4, 1024, GptShape(layers=4)), autocast=True),
    SavedCase("Llama, 1 layer bfloat16 (1 x 2048)", partial(llama_8b, 1, tokens=2048, layers=1)),
)
SMALL_GPT = GptShape(vocabulary=64, tokens=64, layers=2, width=32, heads=2)
SMALL_CASES = (
    SavedCase("ResNet, 2 blocks (4)", partial(resnet, 4, (1, 1), 32), min_bytes=1024),
    SavedCase("BERT, 1 layer (1 x 64)", partial(bert_large, 1, tokens=64, layers=1), min_bytes=1024),
    SavedCase("GPT, 2 small blocks (4 x 64)", partial(gpt, 4, 64, SMALL_GPT), min_bytes=1024),
)


@dataclass(frozen=True, slots=True)
class SavedComparison:
    """Bytes and storages of the prediction and the recording, and the largest that only one of them has, as (made by,
    dtype, total bytes)."""

    case: str
    said: str
    predicted_bytes: int = 0
    found_bytes: int = 0
    predicted_storages: int = 0
    found_storages: int = 0
    only_predicted: tuple[tuple[str, str, int], ...] = ()
    only_found: tuple[tuple[str, str, int], ...] = ()

    @property
    def difference(self) -> float:
        """The difference of the bytes, as a share of the bytes found."""
        return (self.predicted_bytes - self.found_bytes) / self.found_bytes if self.found_bytes else 0.0


def _step_of(case: SavedCase, workload: Workload, device_type: str) -> Callable[[], None]:
    def step() -> None:
        model, inputs, loss = workload
        with torch.autocast(device_type, torch.bfloat16, enabled=case.autocast):
            value = loss(model(*inputs))
        value.backward()  # type: ignore[no-untyped-call]

    return step


def predicted(case: SavedCase) -> Recording:
    def make() -> Staged:
        workload = case.make()
        return Staged(workload.model, _step_of(case, workload, "cuda"), workload.inputs)

    return rehearse(Subject(make), load_profile(HARDWARE), min_bytes=case.min_bytes).recording


def found(case: SavedCase, *, on_gpu: bool) -> Recording:
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        device: Any = "cuda" if on_gpu else stack.enter_context(vdnn.VirtualMachine(HARDWARE, fake=False))
        with torch.device("cuda") if on_gpu else contextlib.nullcontext():
            workload = case.make()
        step = _step_of(case, workload, "cuda" if on_gpu else "cpu")
        session = stack.enter_context(
            contextlib.closing(
                vdnn.offload("vdnn-all", device=device, measure=True, warmup_steps=1, min_bytes=case.min_bytes)
            )
        )
        with session:
            for _ in range(STEPS):
                step()
                workload.model.zero_grad(set_to_none=True)
                session.step()
        recording = session.recording
    if recording is None:
        raise RuntimeError("no step was recorded")
    return recording


def compare(case: SavedCase, expected: Recording, actual: Recording) -> SavedComparison:
    expected_kinds, actual_kinds = _bag(expected), _bag(actual)
    return SavedComparison(
        case.name,
        "",
        expected.managed_bytes,
        actual.managed_bytes,
        len(expected.lifetimes),
        len(actual.lifetimes),
        _named(expected, expected_kinds - actual_kinds),
        _named(actual, actual_kinds - expected_kinds),
    )


Kind = tuple[str, int]  # dtype and bytes


def _kinds(recording: Recording) -> Iterator[tuple[Kind, str]]:
    """The kind of each storage, and the operation that made it."""
    for lifetime in recording.lifetimes:
        key = recording.points[lifetime.saves[0]].key
        assert key is not None, "a save has a key"
        yield (key.dtype, lifetime.nbytes), key.producer or "a leaf"


def _bag(recording: Recording) -> Counter[Kind]:
    return Counter(kind for kind, _ in _kinds(recording))


def _named(recording: Recording, kinds: Counter[Kind]) -> tuple[tuple[str, str, int], ...]:
    """The bytes of as many storages as `kinds` counts, summed by the operation that made them, the largest first."""
    left, sums = Counter(kinds), Counter[tuple[str, str]]()
    for kind, made_by in _kinds(recording):
        if left[kind] > 0:
            left[kind] -= 1
            sums[made_by, kind[0]] += kind[1]
    return tuple((*made, nbytes) for made, nbytes in sums.most_common(MOST_NAMED))


def render(place: str, rows: Sequence[SavedComparison]) -> str:
    header = ("model", "predicted MiB", "saved MiB", "difference", "storages", "saved")
    cells = [
        (row.case, *["-"] * 5)
        if row.said
        else (
            row.case,
            f"{row.predicted_bytes / 2**20:.1f}",
            f"{row.found_bytes / 2**20:.1f}",
            f"{row.difference:+.2%}",
            str(row.predicted_storages),
            str(row.found_storages),
        )
        for row in rows
    ]
    remarks = [f"{row.case}: {row.said}." for row in rows if row.said]
    for row in rows:
        for title, kinds in (("only predicted", row.only_predicted), (f"only on {place}", row.only_found)):
            if kinds:
                named = ", ".join(f"{made} {dtype} {nbytes / 2**20:.2f} MiB" for made, dtype, nbytes in kinds)
                remarks.append(f"{row.case}, {title}: {named}.")
    return render_table(f"What a step saves: as vdnn.plan predicts it, and on {place}", header, cells, remarks)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_a_gpu.saved_on_cuda", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows there, line by line")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("saved_on_cuda: torch sees no GPU here: --device cpu tries the program without one.", file=sys.stderr)
        return 2
    on_gpu = options.device == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else "this CPU"
    cases = CASES if on_gpu else SMALL_CASES
    progress = Progress("saved_on_cuda", len(cases))
    rows: list[SavedComparison] = []
    for case in cases:
        progress.begin(case.name)
        rows.append(_tried(case, on_gpu=on_gpu))
        if options.json is not None:
            with options.json.open("a" if len(rows) > 1 else "w") as lines:
                lines.write(json.dumps(asdict(rows[-1])) + "\n")
    progress.end()
    print(render(where, rows))
    return 1 if any(row.said for row in rows) else 0


def _tried(case: SavedCase, *, on_gpu: bool) -> SavedComparison:
    try:
        return compare(case, predicted(case), found(case, on_gpu=on_gpu))
    except Exception as error:  # an error in one model must not hide the others
        return SavedComparison(case.name, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
    finally:
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
