"""Runs recipes by straight-line code that is made once for each structure of a recipe.

A recipe's structure is its operations, which value each of them reads, and where it is read last. Scalars, sizes and
dtypes stay arguments of the code, so one function serves every layer and every length with the same structure. Another
function fetches what a recipe reads: one for each sequence of kinds of saves.

The code names the values v0, v1, ...: first the given ones, then one for each step. A value is dropped after the step
that reads it last, so that its memory is free for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import torch

from vdnn._C import KeptSave, LightSave
from vdnn.errors import OperandModifiedError, VdnnError
from vdnn.runtime.recompute.given import Constant, Given, Leaf, Unpack, has_memory
from vdnn.runtime.recompute.layouts import UnknownLayoutError, has_original_strides, may_change_strides, reads_layout
from vdnn.runtime.recompute.operation import Call, Operation, Step
from vdnn.runtime.storage.kept import KeptTensor
from vdnn.runtime.storage.packed_view import PackedView

Fetch = Callable[[Sequence[Given], Unpack, str], list[Any]]  # the given values, the unpack hook, the name of the recipe
Run = Callable[[list[Any], Sequence[Step], str], torch.Tensor]  # the values, which it clears, the steps and the name

_MOST = 4096  # functions of each kind; programs with more make them anew

_fetches: dict[tuple[type, ...], Fetch] = {}
_runs: dict[Hashable, Run] = {}


def fetch_for(given: Sequence[Given]) -> Fetch:
    """The function that fetches values of these kinds. It raises OperandModifiedError for a tensor that was modified,
    and any error of the unpack hook."""
    kinds = tuple(map(type, given))
    found = _fetches.get(kinds)
    return found if found is not None else _keep(_fetches, kinds, _compiled_fetch(kinds))


def run_for(steps: Sequence[Step], given: int) -> Run:
    """The function that runs these steps. `given`: how many values are given."""
    structure = given, tuple((one.operation, one.inputs, one.dying, _reads(one)) for one in steps)
    found = _runs.get(structure)
    return found if found is not None else _keep(_runs, structure, _compiled_run(steps, given))


def _keep(known: dict[Any, Any], key: Hashable, made: Any) -> Any:
    if len(known) >= _MOST:
        known.clear()
    known[key] = made
    return made


def _compile(name: str, arguments: str, lines: list[str], constants: dict[str, Any]) -> Any:
    source = f"def {name}({arguments}):\n" + "".join(f"    {line}\n" for line in lines)
    exec(compile(source, f"<{name} of vdnn for a recipe>", "exec"), constants)
    return constants[name]


# Fetching.


def _compiled_fetch(kinds: tuple[type, ...]) -> Fetch:
    names = [f"v{index}" for index in range(len(kinds))]
    lines = [f"({', '.join(names)},) = given"] if names else []
    for name, kind in zip(names, kinds, strict=True):
        lines += _fetching(name, kind)
    lines.append(f"return [{', '.join(names)}]")
    constants = {
        "VIEW": PackedView,
        "LEAF_IN_MEMORY": _leaf_in_memory,
        "SAVE_IN_MEMORY": _save_in_memory,
        "MODIFIED": _modified,
    }
    made: Fetch = _compile("fetch", "given, unpack, name", lines, constants)
    return made


def _fetching(name: str, kind: type) -> list[str]:
    if issubclass(kind, Constant):
        return [f"{name} = {name}.value"]
    if issubclass(kind, (PackedView, LightSave)):  # the hook of a session knows a light save that Python has by now
        return [f"{name} = unpack({name})"]
    if issubclass(kind, KeptSave):
        return [
            f"t = {name}.tensor",
            f"if type(t) is VIEW: {name} = unpack(t)",
            "else:",
            f"    if t._version != {name}.version: MODIFIED(t, {name}.version, name)",
            f"    {name} = unpack({name})",
        ]
    modified = f"if {name}[0]._version != {name}[1]: MODIFIED({name}[0], {name}[1], name)"
    return [modified, f"{name} = {'LEAF' if issubclass(kind, Leaf) else 'SAVE'}_IN_MEMORY({name}, name)"]


def _modified(tensor: torch.Tensor, version: int, name: str) -> NoReturn:
    operand = f"{tensor.type()} {list(tensor.shape)}"
    raise OperandModifiedError(
        recomputed="a tensor", recipe=name, operand=operand, found=tensor._version, expected=version
    )


def _leaf_in_memory(leaf: Leaf, name: str) -> torch.Tensor:
    tensor = leaf.tensor
    if tensor.untyped_storage()._cdata != leaf.storage or not has_memory(tensor):
        _missing(tensor, name)
    return tensor


def _save_in_memory(save: KeptTensor, name: str) -> torch.Tensor:
    """A weight may be a save as well."""
    tensor = save[0]
    if not has_memory(tensor):
        _missing(tensor, name)
    return tensor


def _missing(tensor: torch.Tensor, name: str) -> NoReturn:
    raise VdnnError(
        f"cannot recompute a tensor by {name}: the parameter of shape {tuple(tensor.shape)} that it reads has "
        "other memory than in the forward pass, or none (as in sharded training). Run "
        "vdnn.offload(recompute=False)."
    )


# Running.


def _reads(step: Step) -> bool:
    return reads_layout(step.operation, step.call)


def _compiled_run(steps: Sequence[Step], given: int) -> Run:
    names = [f"v{index}" for index in range(given)]
    lines = ([f"({', '.join(names)},) = values"] if names else []) + ["values.clear()"]
    constants: dict[str, Any] = {
        "OUT_OF_MEMORY": torch.OutOfMemoryError,
        "FAILED": _failed,
        "CHECKED": _checked,
        "REFUSE": _refuse,
        "HAS_STRIDES": has_original_strides,
    }
    may_differ: dict[int, str] = {}  # values whose strides may not be the originals', and the name of the fact
    for number, step in enumerate(steps):
        made = given + number
        constants[f"op{number}"] = step.operation
        inputs = ["None" if index < 0 else f"v{index}" for index in step.inputs]
        match = " and ".join(dict.fromkeys(may_differ[index] for index in step.inputs if index in may_differ))
        if match and _reads(step):
            lines.append(f"if not ({match}): REFUSE(op{number})")
        lines += [
            f"call = steps[{number}].call",
            "try:",
            f"    v{made} = op{number}.run({', '.join(['call', *inputs])})",
            "except OUT_OF_MEMORY: raise",
            f"except RuntimeError as error: FAILED(op{number}, name, error)",
            f"if v{made}.dtype is not call.dtype or v{made}.shape != call.shape:",
            f"    v{made} = CHECKED(op{number}, call, name, v{made})",
        ]
        if match or may_change_strides(step.operation, has_first=bool(inputs) and inputs[0] != "None"):
            may_differ[made] = f"match{made}"
            listed = f"({', '.join(inputs)},)" if inputs else "()"
            lines.append(f"match{made} = HAS_STRIDES(op{number}, {listed}, v{made}, {match or True})")
        lines += [f"v{index} = None" for index in step.dying]
    lines.append(f"return v{given + len(steps) - 1}")
    run: Run = _compile("run", "values, steps, name", lines, constants)
    return run


def _refuse(operation: Operation) -> NoReturn:
    raise UnknownLayoutError(f"{operation.name} would read a value whose original strides are not known")


def _failed(operation: Operation, name: str, error: RuntimeError) -> NoReturn:
    # Torch adds lines about its compiler where memory is missing, as that of a parameter which FSDP2 has resharded.
    first_line = str(error).split("\n", 1)[0]
    raise VdnnError(f"cannot recompute a tensor by {name}: {operation.name} raised: {first_line}") from error


def _checked(operation: Operation, call: Call, name: str, made: torch.Tensor) -> torch.Tensor:
    if made.shape != call.shape:
        raise VdnnError(
            f"cannot recompute a tensor by {name}: {operation.name} made shape {tuple(made.shape)}, "
            f"expected {tuple(call.shape)}. This is a bug in vdnn's recipe."
        )
    if made.dtype is call.dtype:
        return made
    if not operation.may_be_in_place:
        raise VdnnError(
            f"cannot recompute a tensor by {name}: {operation.name} made {made.dtype}, expected {call.dtype}. "
            "This is a bug in vdnn's recipe."
        )
    return made.to(call.dtype)  # an operation in place keeps the dtype of the tensor that it overwrites
