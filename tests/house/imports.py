"""Which room imports which: reads the package's imports off its syntax trees and judges them by floor.

The floors are those of the design, lowest first; a module may import from its own floor or from a lower one,
so nothing below knows what stands on it. A module that no floor names is an offence too: its place must be
decided.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Prefixes of module names, lowest floor first. Rooms of the design that do not exist yet are listed already.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "vdnn.bytesize",
        "vdnn.errors",
        "vdnn.recording",
        "vdnn.timeline",
        "vdnn.step_plan",
        "vdnn.hardware",
        "vdnn.json_form",
        "vdnn.saved_step",
        "vdnn.torch_requirement",
        "vdnn.core_requirement",
    ),
    ("vdnn._C",),
    ("vdnn.planning",),
    (
        "vdnn.runtime.transport",
        "vdnn.runtime.host_share",
        "vdnn.runtime.link_probe",
        "vdnn.runtime.counters",
        "vdnn.runtime.version_check",
        "vdnn.runtime.tolerance",
        "vdnn.runtime.tensor_kinds",
        "vdnn.runtime.spans",
        "vdnn.runtime.holders",
        "vdnn.runtime.process_forks",
        "vdnn.runtime.allocation_tracker",
        "vdnn.runtime.roofline",
    ),
    ("vdnn.runtime.virtual_machine", "vdnn.runtime.tensor_device"),
    ("vdnn.runtime.gauges",),
    (
        "vdnn.runtime.kept",
        "vdnn.runtime.dropped",
        "vdnn.runtime.bit_mask",
        "vdnn.runtime.proof",
        "vdnn.runtime.source_hold",
        "vdnn.runtime.copy_observer",
        "vdnn.runtime.reload_target",
        "vdnn.runtime.residency",
        "vdnn.runtime.codec",
    ),
    ("vdnn.runtime.storage_table", "vdnn.runtime.integrity", "vdnn.runtime.lookahead", "vdnn.runtime.packed_view"),
    ("vdnn.runtime.module_watch", "vdnn.runtime.recompute", "vdnn.runtime.cuda_shaped", "vdnn.runtime.codecs"),
    (
        "vdnn.runtime.recorder",
        "vdnn.runtime.executor",
        "vdnn.runtime.meter",
        "vdnn.runtime.save_keys",
        "vdnn.runtime.trial",
        "vdnn.runtime.deferred_copies",
        "vdnn.runtime.exemptions",
        "vdnn.runtime.step_ends",
        "vdnn.runtime.step_kinds",
        "vdnn.runtime.proofs",
        "vdnn.runtime.readers",
        "vdnn.runtime.rechecks",
    ),
    ("vdnn.runtime.budget_planner",),
    ("vdnn.runtime.plan_book",),
    ("vdnn.runtime.step_ways",),
    ("vdnn.runtime.step_watch",),
    ("vdnn.runtime.rebuilds", "vdnn.runtime.missing", "vdnn.runtime.capture"),
    ("vdnn.runtime.packer", "vdnn.runtime.function_transforms"),
    ("vdnn.runtime.session_report",),
    ("vdnn.runtime.session",),
    ("vdnn.runtime.offload", "vdnn.runtime.save_on_cpu"),
    ("vdnn.report",),
    ("vdnn.runtime.rehearsal", "vdnn.runtime.measured_hardware"),
    ("vdnn.runtime.plan_ahead",),
    ("vdnn.advisor",),
    ("vdnn.doctor",),
    ("vdnn.testing",),
    (
        "vdnn.integrations",
        "vdnn.cli",
        "vdnn.command_line",
        "vdnn.advise_command",
        "vdnn.plan_command",
        "vdnn.report_command",
        "vdnn.__main__",
    ),
)
# The faces: they gather public names and stand on no floor.
FACES = ("vdnn", "vdnn.runtime")
# These rooms never see torch, not even in a function; torch_requirement asks for it by name and is not among
# them.
TORCH_FREE = (
    "vdnn.planning",
    "vdnn.doctor",
    "vdnn.report",
    "vdnn.cli",
    "vdnn.errors",
    "vdnn.bytesize",
    "vdnn.step_plan",
    "vdnn.hardware",
)


@dataclass(frozen=True)
class Import:
    """`importer` names `imported`; `deferred`: inside a function or under TYPE_CHECKING."""

    importer: str
    imported: str
    deferred: bool


def modules_below(root: Path) -> dict[str, str]:
    """The source of every module of the package at `root`, by module name."""
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imports_of(modules: Mapping[str, str]) -> Iterator[Import]:
    for name, source in modules.items():
        tree = ast.parse(source)
        top_level = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            for imported in _named_by(node, name, modules):
                yield Import(name, imported, deferred=id(node) not in top_level)


def _named_by(node: ast.AST, importer: str, modules: Mapping[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = importer.split(".")[: -node.level]
            base = ".".join([*parents, base] if base else parents)
        for alias in node.names:
            # `from package import module` imports the module, which is what has a floor.
            full = f"{base}.{alias.name}"
            yield full if full in modules or full == "vdnn._C" else base


def floor_of(module: str) -> int | None:
    """The floor of `module`, or None if no floor names it."""
    for floor, rooms in enumerate(FLOORS):
        if any(module == room or module.startswith(f"{room}.") for room in rooms):
            return floor
    return None


def offences(modules: Mapping[str, str]) -> list[str]:
    """What breaks the rules, a sentence each."""
    homeless = [f"{name} stands on no floor" for name in modules if name not in FACES and floor_of(name) is None]
    return [*homeless, *_upward(modules), *_torch_seen(modules)]


def _upward(modules: Mapping[str, str]) -> Iterator[str]:
    for found in imports_of(modules):
        here, there = floor_of(found.importer), floor_of(found.imported)
        if here is not None and there is not None and there > here:
            yield f"{found.importer} (floor {here}) imports {found.imported} (floor {there})"


def _torch_seen(modules: Mapping[str, str]) -> Iterator[str]:
    for found in imports_of(modules):
        if found.imported.split(".")[0] != "torch":
            continue
        if any(found.importer == room or found.importer.startswith(f"{room}.") for room in TORCH_FREE):
            yield f"{found.importer} imports torch"
        elif found.importer in FACES and not found.deferred:
            yield f"{found.importer} imports torch when it is imported"
