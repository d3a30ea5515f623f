"""vdnn/_C.pyi compared with the extension it describes.

mypy.stubtest compares names. It cannot see the parameters of pybind11's functions, which have no signature that inspect
understands, and it accepts a missing stub. So these tests compare parameters, defaults and types with the signatures
that pybind11 writes into docstrings. They also check that a wrong stub is reported.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.patience import run_to_its_end
from vdnn import _C

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "vdnn" / "_C.pyi"
# How pybind11 writes the types of arguments that it converts.
CONVERTED = {
    "typing.SupportsInt | typing.SupportsIndex": "int",
    "typing.SupportsFloat | typing.SupportsIndex": "float",
    "collections.abc.": "",
    "vdnn._C.": "",
    "types.CapsuleType": "typing_extensions.CapsuleType",  # since Python 3.13
}
# Return types that pybind11 does not know more precisely. The stub may be more precise.
VAGUE = {"object", "list", "tuple", "dict"}


class Parameter(NamedTuple):
    """One parameter as written: `default` is "" without a default, and "..." if it is not a literal."""

    name: str
    type: str
    default: str


class Signature(NamedTuple):
    parameters: tuple[Parameter, ...]
    returns: str


def written(default: ast.expr) -> str:
    try:
        return repr(ast.literal_eval(default))
    except ValueError:
        return "..."


def read_signature(function: ast.FunctionDef) -> Signature:
    arguments = [*function.args.args, *function.args.kwonlyargs]
    plain = [*function.args.defaults, *function.args.kw_defaults]
    defaults = [None] * (len(arguments) - len(plain)) + plain
    parameters = (
        Parameter(
            argument.arg,
            ast.unparse(argument.annotation) if argument.annotation else "",
            written(default) if default else "",
        )
        for argument, default in zip(arguments, defaults, strict=True)
        if argument.arg not in ("self", "arg0")  # pybind11 calls the self of a property arg0
    )
    return Signature(tuple(parameters), ast.unparse(function.returns) if function.returns else "")


def stub_signatures(text: str) -> dict[str, Signature]:
    """Signatures by dotted name. For overloads, the last one, which is the widest."""
    found = {}
    for node in ast.parse(text).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for member in members:
            if isinstance(member, ast.FunctionDef):
                found[prefix + member.name] = read_signature(member)
    return found


def docstring_signature(line: str) -> Signature:
    for theirs, ours in CONVERTED.items():
        line = line.replace(theirs, ours)
    # A default such as <Growth.NOW: 0> is not valid Python.
    line = re.sub(r"= <[^>]*>", "= ...", line)
    function = ast.parse(f"def {line}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return read_signature(function)


def runtime_signatures() -> Iterator[tuple[str, Signature]]:
    holders = [("", _C), *((f"{name}.", held) for name, held in vars(_C).items() if isinstance(held, type))]
    for prefix, holder in holders:
        for name, member in vars(holder).items():
            function = member.fget if isinstance(member, property) else member
            first = (getattr(function, "__doc__", None) or "").split("\n")[0]
            opens = re.match(r"(\w*)\(", first)
            if opens is None or "*args" in first or not callable(function) or isinstance(function, type):
                continue
            if name.startswith("__") and name != "__init__":
                continue
            yield prefix + name, docstring_signature(first if opens[1] else name + first)


def disagreements(text: str) -> list[str]:
    stub = stub_signatures(text)
    enums = {name for name, held in vars(_C).items() if hasattr(held, "__members__")}
    wrong = []
    for name, runtime in runtime_signatures():
        if name.split(".")[0] in enums:
            continue
        ours = stub.get(name)
        if ours is None or ours.parameters != runtime.parameters or not returns_agree(ours, runtime):
            wrong.append(f"{name}: the stub has {ours}, the extension {runtime}")
    return wrong


def returns_agree(ours: Signature, runtime: Signature) -> bool:
    """Says whether the types agree. pybind11 does not mention the None that a null pointer becomes."""
    known = runtime.returns.removesuffix(" | None")
    return known in VAGUE or ours.returns.removesuffix(" | None") == known


def run_stubtest(root: Path) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed: pip install '.[lint]'")
    command = [sys.executable, "-m", "mypy.stubtest", "vdnn._C", "--concise"]
    environment = {**os.environ, "MYPYPATH": str(root), "PYTHONPATH": str(ROOT)}
    return run_to_its_end(command, cwd=root, env=environment)


def package_with(stub: str, root: Path) -> Path:
    """A package with only the stub: mypy takes ten times as long to read the whole package and torch."""
    package = root / "vdnn"
    package.mkdir()
    (package / "__init__.pyi").write_text("")
    (package / "_C.pyi").write_text(stub)
    return root


def test_the_stub_names_what_the_extension_has(tmp_path: Path) -> None:
    done = run_stubtest(package_with(STUB.read_text(), tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stub_that_lacks_a_method_is_found(tmp_path: Path) -> None:
    text = STUB.read_text()
    done = run_stubtest(package_with(text.replace("    def trim(self", "    def trimmed(self"), tmp_path))
    assert done.returncode != 0
    assert "vdnn._C.PinnedPool.trim is not present in stub" in done.stdout


def test_signatures_are_those_of_the_extension() -> None:
    assert len(list(runtime_signatures())) > 100
    assert disagreements(STUB.read_text()) == []


@pytest.mark.parametrize(
    ("was", "becomes", "name"),
    [
        ("stream: Stream, event: Event", "stream: Stream, after: Event", "Device.wait"),
        ("slack: float = 1.05", "slack: float = 1.5", "PinnedPool.__init__"),
        ("def live_bytes(self) -> int", "def live_bytes(self) -> str", "PoolStats.live_bytes"),
    ],
)
def test_a_signature_that_differs_is_found(was: str, becomes: str, name: str) -> None:
    text = STUB.read_text()
    assert was in text
    assert [line.split(":")[0] for line in disagreements(text.replace(was, becomes, 1))] == [name]
