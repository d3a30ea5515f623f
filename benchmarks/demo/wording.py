"""The text of the demo: both runs side by side, and a few sentences about the result."""

from __future__ import annotations

from benchmarks.demo.devices import Measured
from benchmarks.demo.training import SideBySide
from benchmarks.text_table import render_table
from vdnn.bytesize import format_bytes

HEADER = ("step", "loss, plain PyTorch", "loss, vdnn", "same bits", "peak, plain", "peak, vdnn", "")


def training_text(trained: SideBySide) -> str:
    size = trained.size
    title = f"1. A GPT of {size.layers} layers, trained on the pages of docs/, byte by byte"
    rows = [
        (
            str(step + 1),
            f"{plain:.9f}",
            f"{ours:.9f}",
            "NO" if step in trained.different_steps else "yes",
            _peak(trained.plain.measured[step]),
            _peak(trained.ours.measured[step]),
            _doing(trained, step),
        )
        for step, (plain, ours) in enumerate(zip(trained.plain.losses, trained.ours.losses, strict=True))
    ]
    where = {
        "virtual": f"Real tensors, trained on this CPU. No GPU was used: the bytes of all tensors are counted, and the "
        f"time is computed for a {trained.device_name}.",
        "cuda": f"Trained and measured on this machine's GPU, {trained.device_name}.",
    }[trained.cell_place]
    when = "A session first records a step. It then makes the plan, and the budget holds from there on."
    return render_table(title, HEADER, rows, [where, when])


def verdict(trained: SideBySide) -> str:
    """Returns one line for each claim of the demo."""
    steps, tensors = len(trained.plain.losses), len(trained.plain.tensors)
    same_steps = steps - len(trained.different_steps)
    same_tensors = tensors - len(trained.different_tensors)
    share = 100 * trained.planned_peak_bytes / trained.plain_peak_bytes
    lines = [
        "What this shows:",
        f"  losses      {_word(not trained.different_steps)}: {same_steps} of {steps} equal bit for bit",
        f"  weights     {_word(not trained.different_tensors)}: {same_tensors} of {tensors} parameters and gradients "
        "equal bit for bit after the last step",
        f"  memory      {_word(trained.holds_budget)}: peak {format_bytes(trained.plain_peak_bytes)} without vdnn, "
        f"{format_bytes(trained.planned_peak_bytes)} ({share:.0f} %) under a budget of "
        f"{format_bytes(trained.budget_bytes)}",
    ]
    if not trained.is_finite:
        lines.append("  numbers     WRONG: a loss, a parameter or a gradient is not finite")
    plain, ours = trained.plain.measured[-1], trained.ours.measured[-1]
    if plain is not None and ours is not None and plain.step_ns:
        lines.append(
            f"  time        a step takes {100 * (ours.step_ns / plain.step_ns - 1):+.1f} % "
            f"({'computed' if trained.clock == 'virtual' else 'measured, one step'})"
        )
    return "\n".join(lines)


def _word(is_right: bool) -> str:
    return "right" if is_right else "WRONG"


def _peak(measured: Measured | None) -> str:
    return "" if measured is None else format_bytes(measured.peak_bytes)


def _doing(trained: SideBySide, step: int) -> str:
    """Says what the session does in a step."""
    if step >= trained.planned_from:
        return "follows the plan"
    return "records" if step == trained.planned_from - 1 else "warms up"
