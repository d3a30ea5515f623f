"""Runs the code of a notebook, cell by cell in one interpreter, and shows what a notebook would show:

    python tests/docs/notebook_cells.py examples/plan_without_a_gpu.ipynb     # runs it and stores its outputs

An output is what a cell prints, and its last expression: a PNG if it has `_repr_png_`, else text. A kernel and the
thirty packages that it needs would show the same. The cells run in a new folder.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Output = dict[str, Any]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs_of(notebook: dict[str, Any], folder: Path) -> list[list[Output]]:
    """Runs each code cell in `folder` and returns its outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with _inside(folder):
        return [
            _run("".join(cell["source"]), number, names) for number, cell in enumerate(code_cells(notebook), start=1)
        ]


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _run(source: str, number: int, names: dict[str, Any]) -> list[Output]:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    where = f"cell {number}"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        value = eval(compile(ast.Expression(last.value), where, "eval"), names) if isinstance(last, ast.Expr) else None
    outputs: list[Output] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        shown = {"data": _data_of(value), "metadata": {}, "execution_count": number}
        outputs.append({"output_type": "execute_result", **shown})
    return outputs


def _data_of(value: Any) -> dict[str, Any]:
    if hasattr(value, "_repr_png_"):
        return {"image/png": base64.b64encode(value._repr_png_()).decode(), "text/plain": ["a picture"]}
    return {"text/plain": repr(value).splitlines(keepends=True)}


def main() -> None:
    path = Path(sys.argv[1]).resolve()
    notebook = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        found = outputs_of(notebook, Path(folder))
    for number, (cell, outputs) in enumerate(zip(code_cells(notebook), found, strict=True), start=1):
        cell |= {"outputs": outputs, "execution_count": number}
    path.write_text(json.dumps(notebook, indent=1) + "\n")


if __name__ == "__main__":
    main()
