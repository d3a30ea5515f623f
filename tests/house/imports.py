"""Reads the imports of the package's rooms from its syntax trees, and reports those that break the rules.

A module imports from its own room or a lower one, so no room depends on a higher one and rooms form no cycle. Nor do
modules, also not by imports inside functions or for types alone. Nor does one import a face, which names modules of
many rooms. A module outside every room is an offence too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

# Rooms, lowest first. A room is a folder or a single module. A module imports from its own room or from a lower one.
# docs/design.md and CONTRIBUTING.md quote this list, and a test compares.
ROOMS: tuple[str, ...] = (
    "vdnn.version",
    "vdnn.bytesize",
    "vdnn.errors",
    "vdnn.user_warnings",
    "vdnn.requirements",
    "vdnn.step",
    "vdnn._C",
    "vdnn.hardware",
    "vdnn.planning",
    "vdnn.runtime.torch_internals",
    "vdnn.runtime.storage",
    "vdnn.runtime.training_state",
    "vdnn.runtime.machine",
    "vdnn.runtime.recompute",
    "vdnn.runtime.steps",
    "vdnn.runtime.session",
    "vdnn.report",
    "vdnn.runtime.rehearsal",
    "vdnn.advisor",
    "vdnn.doctor",
    "vdnn.integrations",
    "vdnn.cli",
    "vdnn.__main__",
)
# Packages that only contain rooms or gather public names, and import nothing when they are imported.
FACES = ("vdnn", "vdnn.runtime")
# No module here imports torch, not even inside a function. vdnn.requirements looks for torch by name.
TORCH_FREE = (
    "vdnn.version",
    "vdnn.bytesize",
    "vdnn.errors",
    "vdnn.user_warnings",
    "vdnn.step",
    "vdnn.hardware",
    "vdnn.planning",
    "vdnn.report",
    "vdnn.doctor",
    "vdnn.cli",
)
# (importer, imported): directions that hold inside a room. `auto` does not depend on published policies.
FORBIDDEN = (
    ("vdnn.planning.search", "vdnn.planning.published"),
    ("vdnn.planning.bound", "vdnn.planning.published"),
    ("vdnn.planning.policies", "vdnn.planning.published"),
    ("vdnn.planning.training", "vdnn.planning.published"),
    ("vdnn.planning.policies", "vdnn.planning.search"),
)


@dataclass(frozen=True)
class Import:
    """`importer` names `imported`. `deferred`: the import is inside a function or under TYPE_CHECKING."""

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
        for node in _statements(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for imported in _named_by(node, name, modules):
                    yield Import(name, imported, deferred=id(node) not in top_level)


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements. ast.walk looks at each expression, too, which takes four times as long."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, part, None)
            waiting += inner if isinstance(inner, list) else []


def _named_by(node: ast.Import | ast.ImportFrom, importer: str, modules: Mapping[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    else:
        base = node.module or ""
        if node.level:
            parents = importer.split(".")[: -node.level]
            base = ".".join([*parents, base] if base else parents)
        for alias in node.names:
            # `from package import module` imports the module, so the module's room counts.
            full = f"{base}.{alias.name}"
            yield full if full in modules or full == "vdnn._C" else base


def room_of(module: str) -> str | None:
    """The room of `module`, or None if no room has it."""
    return next((room for room in ROOMS if _is_in(module, room)), None)


def _is_in(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def offences(modules: Mapping[str, str]) -> list[str]:
    """One sentence per broken rule."""
    homeless = [f"{name} is in no room" for name in modules if name not in FACES and room_of(name) is None]
    imports = list(imports_of(modules))
    return [
        *homeless,
        *_faces_named(imports),
        *_upward(imports),
        *_forbidden(imports),
        *_torch_seen(imports),
        *_circles(imports),
    ]


def _faces_named(imports: Sequence[Import]) -> Iterator[str]:
    for found in imports:
        if found.imported in FACES:
            yield f"{found.importer} imports {found.imported}, which is a face"


def _upward(imports: Sequence[Import]) -> Iterator[str]:
    for found in imports:
        here, there = room_of(found.importer), room_of(found.imported)
        if here is not None and there is not None and ROOMS.index(there) > ROOMS.index(here):
            yield f"{found.importer} imports {found.imported}, which is in a higher room"


def _forbidden(imports: Sequence[Import]) -> Iterator[str]:
    for found in imports:
        for importer, imported in FORBIDDEN:
            if _is_in(found.importer, importer) and _is_in(found.imported, imported):
                yield f"{found.importer} imports {found.imported}: no {importer} may import {imported}"


def _torch_seen(imports: Sequence[Import]) -> Iterator[str]:
    for found in imports:
        if found.imported.split(".")[0] != "torch":
            continue
        if any(_is_in(found.importer, room) for room in TORCH_FREE):
            yield f"{found.importer} imports torch"
        elif found.importer in FACES and not found.deferred:
            yield f"{found.importer} imports torch when it is imported"


def _circles(imports: Sequence[Import]) -> Iterator[str]:
    """Modules that import each other, directly or through others. A package's face is no module here."""
    imported_by: dict[str, set[str]] = {}
    for found in imports:
        if found.importer not in FACES and found.imported not in FACES:
            imported_by.setdefault(found.importer, set()).add(found.imported)
    sorter = TopologicalSorter(imported_by)
    try:
        sorter.prepare()
    except CycleError as error:
        yield f"{' imports '.join(reversed(error.args[1]))}: a circle"
