"""Prints a line for each model, and where a rehearsal differs from CUDA. Exits with 1 if a difference is not known.

python -m benchmarks.cuda_saves              every model
python -m benchmarks.cuda_saves resnet50 T5  some of them
python -m benchmarks.cuda_saves --autocast bfloat16
                                             under autocast in that dtype
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.cuda_saves import models_of_diffusers, models_of_timm, models_of_transformers
from benchmarks.cuda_saves.difference import byte_error, differences
from benchmarks.cuda_saves.known import KNOWN
from benchmarks.cuda_saves.saves import cuda_saves, rehearsed_saves
from benchmarks.cuda_saves.zoo import zoo

_BATCH = 2
_SHOWN = 6


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_saves", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="the models to compare. Default: all")
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), help="compare under autocast in this dtype")
    given = parser.parse_args(arguments)
    wanted = given.names
    precision = None if given.autocast is None else getattr(torch, given.autocast)
    if torch.version.cuda is None:
        sys.stderr.write(f"torch {torch.__version__} is not a CUDA build: there is nothing to compare with.\n")
        return 2
    chosen_by = "torch, on this GPU" if torch.cuda.is_available() else "the rehearsal: there is no GPU"
    under = "" if given.autocast is None else f"autocast in {given.autocast}; "
    sys.stdout.write(f"torch {torch.__version__}; {under}fused attention is chosen by {chosen_by}\n")
    everything = {**zoo(), **models_of_transformers.subjects(), **models_of_timm.subjects()}
    everything.update(models_of_diffusers.subjects())
    models = {name: make for name, make in everything.items() if not wanted or name in wanted}
    failed = [name for name, make in models.items() if not _same(name, make, precision)]
    sys.stdout.write(f"not as CUDA, and not known: {', '.join(failed) or 'none'}\n")
    return int(bool(failed))


def _same(name: str, make: Callable[[int], Any], precision: torch.dtype | None) -> bool:
    """Compares one model. True if it does not differ, or only as is known."""
    reason = KNOWN.get(name, "")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries warn of what a tensor without data cannot do
            ours = rehearsed_saves(make, _BATCH, precision)
            theirs = cuda_saves(make, _BATCH, precision)
    except Exception as error:
        sys.stdout.write(f"{name}: could not be compared: {type(error).__name__}: {str(error).splitlines()[0]}\n")
        return bool(reason)
    found = differences(ours, theirs)
    said = "the same" if not found else f"{len(found)} places differ{f' (known: {reason})' if reason else ''}"
    sys.stdout.write(f"{name}: {len(theirs)} storages, {byte_error(ours, theirs):+.4%} of the bytes; {said}\n")
    for one in found[:_SHOWN]:
        sys.stdout.write(f"    {one}\n")
    sys.stdout.flush()
    return not found or bool(reason)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
