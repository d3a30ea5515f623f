"""Plans one model on a virtual H100 without data, and runs the plan there: what was predicted beside what ran."""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from vdnn.hardware import load_profile
from vdnn.planning.costs import profile_costs
from vdnn.planning.least_memory import least_bytes
from vdnn.planning.planned_step import plan_step
from vdnn.runtime.rehearsal.rehearsal import rehearse, subject_of

HARDWARE = "h100"
PLANNED, FAILED, NO_ANSWER = "planned", "failed", "no answer"
NOT_IN_TORCH = "cannot be made in torch"  # by its default configuration
Row = dict[str, Any]
_MOST_WAITING = 20  # so many times its processor time may pass on a busy machine


def planned_row(name: str, make: Callable[[int], Any], batch: int, limit_s: float) -> Row:
    """The row of a model, made in a forked process that ends after `limit_s` of its processor time, which other work of
    the machine does not use up."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_row, args=(theirs, make, batch, limit_s))
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of math libraries exist, and have not run yet
        process.start()
    theirs.close()
    try:
        row: Row = ours.recv() if ours.poll(_MOST_WAITING * limit_s) else _no_answer(limit_s)
        process.kill()
        process.join()
    except EOFError:
        process.join()
        row = {"outcome": FAILED, "error": "its process ended without a word"}
        if process.exitcode == -signal.SIGXCPU:
            row = _no_answer(limit_s)
    return {"name": name, **row, "seconds": round(time.monotonic() - began, 1)}


def _no_answer(limit_s: float) -> Row:
    return {"outcome": NO_ANSWER, "error": f"no answer in {limit_s:.0f} s of processor time"}


def _send_row(to: Connection, make: Callable[[int], Any], batch: int, limit_s: float) -> None:
    begun_s = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(begun_s + limit_s), resource.RLIM_INFINITY))
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        row = plan_and_run(make, batch)
    except Exception as error:
        words = f"{type(error).__name__}: {error}".split("\n")[0]
        row = {"outcome": FAILED if _is_made_in_torch(make, batch) else NOT_IN_TORCH, "error": words[:300]}
    to.send({**row, "processor_seconds": round(time.process_time() - begun_s, 1)})


def _is_made_in_torch(make: Callable[[int], Any], batch: int) -> bool:
    try:
        with torch.device("meta"):
            make(batch)
    except Exception:
        return False
    return True


def plan_and_run(make: Callable[[int], Any], batch: int) -> Row:
    """Plans the step halfway between the least memory and that of everything kept, and runs it under the plan."""
    begun_s = time.process_time()
    torch.set_num_threads(1)
    profile, subject = load_profile(HARDWARE), subject_of(make, batch)
    rehearsal = rehearse(subject, profile)
    recording = rehearsal.recording
    least, kept = least_bytes(recording), recording.peak_bytes
    budget = (least + kept) // 2
    planned = plan_step(recording, profile_costs(profile), budget, must_fit=True)
    plan_s = time.process_time() - begun_s
    timeline = rehearse(subject, profile, plan=planned.plan, after=rehearsal).timeline
    assert timeline is not None, "the rehearsal of a plan measures its step"
    return {
        "outcome": PLANNED,
        "parameter_bytes": rehearsal.parameter_bytes,
        "saves": len(recording.lifetimes),
        "kept_bytes": kept,
        "least_bytes": least,
        "budget_bytes": budget,
        "kept_ns": recording.kept_ns,
        "predicted_ns": planned.timeline.step_ns,
        "predicted_bytes": planned.timeline.peak_bytes,
        "run_ns": timeline.step_ns,
        "run_bytes": timeline.peak_bytes,
        "stand_ins": len(rehearsal.stand_ins),
        "plan_seconds": round(plan_s, 1),  # of processor time, without the run
    }
