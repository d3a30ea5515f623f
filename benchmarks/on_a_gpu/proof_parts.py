"""The three parts of gpu-proof: the steps of each with their limits, in order of worth.

Each part stands alone and ends within nine minutes: the limits of its steps add up to less. A step is a command in a
process of its own and a judge of what it wrote. In a dry run, the same programs train tiny networks on virtual
machines, the tests take the fake driver, and nothing is built.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.on_a_gpu.judges import (
    Judge,
    judge_by_last_line,
    judge_by_output,
    judge_claims,
    judge_doctor,
    judge_hooks,
    judge_machine,
    judge_sweep,
    judge_table,
    judge_tests,
)

ROOT = Path(__file__).resolve().parents[2]
PART_S = 540.0
# What is left of a part for its own start, for archives, and for the end of processes that ran past their limits.
SPARE_S = 20.0
FAKE_DRIVER = ROOT / "build" / "testing" / "libvdnn_fake_driver.so"
# A sweep that is told to stop ends a cell and prints its tables.
LAST_CELL_S = 12.0
# Above any single test; where a test hangs, Python says where before the step is over.
FAULT_S = 25


@dataclass(frozen=True, slots=True)
class Context:
    """A part that runs: its work folder, whether it is a dry run, and whether the core is taken as it is."""

    work: Path
    dry: bool
    as_it_is: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `command` gets its limit in seconds. `needs` are packages without which it cannot run. A step that
    `takes_rest` may also use time that the steps before it have left. Unless its facts have what it `must_find`, the
    steps behind it do not run."""

    name: str
    limit_s: float
    command: Callable[[Context, float], list[str]]
    judge: Judge
    needs: tuple[str, ...] = ()
    takes_rest: bool = False
    must_find: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


def program(name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", name, *options]


# The steps that every part begins with.


def _machine(context: Context, limit_s: float) -> list[str]:
    options = ["--json", str(context.work / "machine.json")]
    if context.dry:
        options += ["--driver", str(FAKE_DRIVER), "--without-gpu"]
    return program("benchmarks.on_a_gpu.machine_report", *options)


def _build(context: Context, limit_s: float) -> list[str]:
    return program("benchmarks.on_a_gpu.build_in_place", *(["--as-it-is"] if context.dry or context.as_it_is else []))


BEGIN = (
    Step("machine", 45, _machine, judge_machine, must_find="gpus"),
    Step("build", 125, _build, judge_by_last_line),
)


# checks


def _tests(folder: str, dry: str, dry_folder: str) -> Callable[[Context, float], list[str]]:
    """The tests of a folder that are marked gpu; in a dry run those of `dry_folder` whose names match `dry`.

    The settings of pyproject.toml are replaced: CUDA's own warnings are not failures, and options of plugins that are
    not installed are not errors."""

    def command(context: Context, limit_s: float) -> list[str]:
        chosen = [dry_folder, "-k", f"({dry}) and not cuda-"] if context.dry else [folder, "-m", "gpu"]
        settings = ["addopts=--import-mode=importlib", "filterwarnings=default", "console_output_style=classic"]
        settings += [f"faulthandler_timeout={FAULT_S}"]
        options = [word for setting in settings for word in ("-o", setting)]
        options += ["--benchmark-disable"] if importlib.util.find_spec("pytest_benchmark") else []
        return program("pytest", *chosen, *options, "-p", "no:cacheprovider", "-v", "-rfEs", "--tb=short")

    return command


def _tests_step(
    folder: str, limit_s: float, *, dry: str, dry_folder: str | None = None, needs: tuple[str, ...] = ()
) -> Step:
    environment = {"VDNN_REQUIRE_CUDA": "1", "VDNN_DELAY_SEEDS": "6", "COLUMNS": "140"}
    name = folder.removeprefix("tests/").removeprefix("runtime/").removesuffix(".py").replace("/test_", " ")
    needs = ("pytest", "hypothesis", *needs)
    command = _tests(folder, dry, dry_folder or folder)
    return Step(name, limit_s, command, judge_tests, needs, takes_rest=True, environment=environment)


TESTS = (
    _tests_step("tests/device", 30, dry="fake and contract and not late"),
    _tests_step("tests/codec", 15, dry="pack and not property", needs=("numpy",)),
    _tests_step("tests/transfer", 20, dry="fake and not late", needs=("pytest_benchmark",)),
    _tests_step("tests/runtime/session/test_on_cuda.py", 50, dry="virtual and streams"),
    _tests_step("tests/runtime/session/test_delays_on_cuda.py", 35, dry="virtual and missing"),
    _tests_step(
        "tests/benchmarks/test_demo_on_cuda.py",
        30,
        dry="a_bit_makes",
        dry_folder="tests/benchmarks/test_identical_gradients.py",
    ),
)


def _tiny(context: Context, limit_s: float) -> list[str]:
    options = ["--out", str(context.work / "tiny"), "--limit-s", f"{max(limit_s - 8, 1):.0f}"]
    if context.dry:
        options += ["--place", "sim", "--workloads", "gpt2,unet"]
    return program("benchmarks.on_a_gpu.tiny_networks", *options)


def _training_state(context: Context, limit_s: float) -> list[str]:
    options = ["--json", str(context.work / "training_state.jsonl")]
    return program("benchmarks.on_a_gpu.training_state_ways", *options, *(["--device", "sim"] if context.dry else []))


def _doctor(context: Context, limit_s: float) -> list[str]:
    if not context.dry:
        return program("vdnn", "doctor", "--json")
    examined = f"examine(Sources(library={str(FAKE_DRIVER)!r}))"
    return [sys.executable, "-c", f"from vdnn.doctor import *; print(render_json({examined}))"]


def _link(context: Context, limit_s: float) -> list[str]:
    options = ["--json", str(context.work / "run" / "link.jsonl")]
    return program("benchmarks.on_a_gpu.link_sizes", *options, *(["--device", "sim"] if context.dry else []))


def _statistics(context: Context, limit_s: float) -> list[str]:
    options = ["--json", str(context.work / "statistics.jsonl")]
    return program("benchmarks.on_a_gpu.statistics_cost", *options, *(["--device", "cpu"] if context.dry else []))


def _workspaces(context: Context, limit_s: float) -> list[str]:
    options = ["--json", str(context.work / "workspaces.jsonl"), "--into", str(context.work / "profile.json")]
    return program("benchmarks.on_a_gpu.workspace_table", *options, *(["--device", "sim"] if context.dry else []))


def _hooks(context: Context, limit_s: float) -> list[str]:
    return program("benchmarks.core.hook_cost", "--json", str(context.work / "hook_cost.json"))


LINK = Step("link", 15, _link, judge_table("run/link.jsonl"))
CHECKS = (
    *BEGIN,
    Step("doctor", 10, _doctor, judge_doctor),
    Step("tiny networks", 45, _tiny, judge_by_last_line, takes_rest=True),
    Step("training state", 40, _training_state, judge_table("training_state.jsonl"), takes_rest=True),
    *TESTS,
    LINK,
    Step("statistics", 10, _statistics, judge_table("statistics.jsonl")),
    Step("workspaces", 15, _workspaces, judge_table("workspaces.jsonl"), takes_rest=True),
    Step("hooks", 35, _hooks, judge_hooks),
)


# steps, zoo


@dataclass(frozen=True, slots=True)
class Sweep:
    """A grid of cells that one step measures into the run `out`."""

    workloads: tuple[str, ...]
    peers: str
    budgets: str
    out: str = "run"
    steps: int = 7
    cell_s: float = 60.0
    dry_workloads: tuple[str, ...] | None = None
    deterministic: bool = False

    def command(self, context: Context, limit_s: float) -> list[str]:
        workloads = self.dry_workloads if context.dry and self.dry_workloads is not None else self.workloads
        options = ["--place", "sim" if context.dry else "cuda", "--workloads", ",".join(workloads)]
        options += ["--peers", self.peers, "--budgets", self.budgets, "--steps", str(self.steps)]
        options += ["--out", str(context.work / self.out), "--cell-limit-s", f"{min(self.cell_s, limit_s / 2):.0f}"]
        options += ["--limit-s", f"{max(limit_s - LAST_CELL_S, 1):.0f}"]
        options += ["--deterministic"] if self.deterministic else []
        return program("benchmarks.sweep", *options)

    def step(self, name: str, limit_s: float) -> Step:
        judge = judge_sweep(self.out, self.workloads)
        return Step(name, limit_s, self.command, judge, takes_rest=True, environment={"OMP_NUM_THREADS": "4"})


def _claims(context: Context, limit_s: float) -> list[str]:
    return program("benchmarks.claims", str(context.work / "run"))


CLAIMS = Step("claims", 15, _claims, judge_claims)
# `peers`: checkpoint's peak is the third budget.
BESIDE_CHECKPOINT = ("plain,checkpoint,vdnn-auto", "90%,75%,peers")
STEPS = (
    *BEGIN,
    *(Sweep((name,), *BESIDE_CHECKPOINT).step(name, 95) for name in ("resnet50", "gpt2")),
    *(
        Sweep((name,), *BESIDE_CHECKPOINT, out="bits", steps=2, deterministic=True).step(f"{name}, bits", 65)
        for name in ("resnet50", "gpt2")
    ),
    LINK,
    CLAIMS,
)

# One of each kind first, because the time may end before the last.
ZOO_WORKLOADS = (
    *("vgg16", "densenet121", "bert_large", "unet", "llama_1b_4k", "vit_base", "inception_v4", "mobilenet_v2"),
    *("mixtral", "lstm", "unet3d", "gpt2_xl", "resnet152", "llama_8b_4k", "googlenet", "alexnet", "resnet1202"),
    *("vgg416", "inception_v3", "densenet201", "bert_base", "vit_large", "resnet18", "llama_1b_16k", "overfeat"),
)
PEERS = "plain,checkpoint,checkpoint-selective,vdnn-dyn,vdnn-auto,trl,torchtune,deepspeed-checkpoint,save-on-cpu-pinned"


def _varying(context: Context, limit_s: float) -> list[str]:
    options = ["--json", str(context.work / "varying.jsonl"), "--limit-s", f"{max(limit_s - 15, 1):.0f}"]
    if context.dry:
        options += ["--device", "virtual", "--cases", "decoder", "--steps", "8"]
    return program("benchmarks.on_a_gpu.varying_shapes", *options)


def _compiled(context: Context, limit_s: float) -> list[str]:
    options = ["--json", str(context.work / "compiled.jsonl")]
    return program("benchmarks.on_a_gpu.compiled_budget", *options, *(["--device", "cpu"] if context.dry else []))


def _saved(context: Context, limit_s: float) -> list[str]:
    options = ["--json", str(context.work / "saved.jsonl")]
    return program("benchmarks.on_a_gpu.saved_on_cuda", *options, *(["--device", "cpu"] if context.dry else []))


ZOO = (
    *BEGIN,
    Step("varying shapes", 80, _varying, judge_by_output),
    Step("compiled", 40, _compiled, judge_table("compiled.jsonl"), takes_rest=True),
    Sweep(ZOO_WORKLOADS, "plain,vdnn-auto", "75%", steps=3, cell_s=40, dry_workloads=("lstm", "vgg16")).step(
        "zoo", 100
    ),
    Sweep(("gpt2", "resnet50"), PEERS, "peers", steps=3, cell_s=40, dry_workloads=("gpt2",)).step("peers", 75),
    Step("saved", 40, _saved, judge_table("saved.jsonl")),
    CLAIMS,
)

PARTS: dict[str, Sequence[Step]] = {"checks": CHECKS, "steps": STEPS, "zoo": ZOO}
