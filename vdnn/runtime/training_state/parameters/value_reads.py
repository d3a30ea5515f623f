"""Tells whether a program that takes a parameter reads its values, from the instruction that follows.

A parameter that is taken outside of its module comes to the device, for as long as the module that takes it runs.
Many programs take one for its dtype or its shape alone (`x.to(self.head.weight.dtype)`); those need no copy. Bytecode
that is not understood counts as a read.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator
from types import CodeType, FrameType

import torch

from vdnn.runtime.torch_internals import parameter_access

# Attributes and methods that need no values, and are the same on every device.
_FACTS = frozenset(
    (
        *("shape", "dtype", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "_version", "itemsize"),
        *("is_quantized", "is_nested", "is_sparse", "_base", "nbytes", "size", "dim", "stride", "numel", "nelement"),
        *("element_size", "storage_offset", "is_contiguous", "is_floating_point", "is_complex", "requires_grad_"),
        *("ndimension", "_backward_hooks", "_post_accumulate_grad_hooks", "__class__"),
    )
)
_IN_BETWEEN_FILES = (parameter_access.__file__, torch.nn.modules.module.__file__)
_IN_BETWEEN = frozenset(("CACHE", "NOP", "EXTENDED_ARG"))


def reads_values(depth: int = 1) -> bool:
    """False if the program takes facts only. `depth`: the depth of the frame of the parameter dict's method that it
    called."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code.co_filename in _IN_BETWEEN_FILES:
        frame = frame.f_back
    return frame is None or _reads_values(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def _reads_values(code: CodeType, offset: int) -> bool:
    following = _instructions(code, offset)
    next(following, None)
    after = next(following, None)
    if after is None:
        return True
    if _is_variable(after, "STORE"):  # `for parameter in ...`
        uses = [*_after_loads(code, str(after.argval))]
        return not uses or not all(map(_is_fact, uses))
    return not _is_fact(after)


def _instructions(code: CodeType, offset: int = 0) -> Iterator[dis.Instruction]:
    """Those from the one at `offset` on. Since Python 3.12, a frame that runs a generator may be inside of one."""
    found = [one for one in dis.get_instructions(code) if one.opname not in _IN_BETWEEN]
    first = max((index for index, one in enumerate(found) if one.offset <= offset), default=0)
    return (part for one in found[first:] for part in _parts(one))


def _parts(instruction: dis.Instruction) -> Iterator[dis.Instruction]:
    """Since Python 3.13, one instruction may store or load two variables: STORE_FAST_LOAD_FAST."""
    first, is_both, second = instruction.opname.partition("_FAST_")
    if is_both and isinstance(instruction.argval, tuple):
        for opname, variable in zip((f"{first}_FAST", second), instruction.argval, strict=True):
            yield instruction._replace(opname=opname, argval=variable)
    else:
        yield instruction


def _is_fact(instruction: dis.Instruction | None) -> bool:
    is_access = instruction is not None and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
    return is_access and instruction is not None and instruction.argval in _FACTS


def _is_variable(instruction: dis.Instruction, kind: str) -> bool:
    return instruction.opname in (f"{kind}_FAST", f"{kind}_NAME", f"{kind}_DEREF")


def _after_loads(code: CodeType, name: str) -> Iterator[dis.Instruction | None]:
    """The instruction behind each one that loads the variable; None behind others that have to do with it."""
    before: dis.Instruction | None = None
    for one in _instructions(code):
        if before is not None and before.argval == name and not before.opname.startswith("STORE"):
            yield one if before.opname.startswith("LOAD_FAST") or _is_variable(before, "LOAD") else None
        elif before is not None and isinstance(before.argval, tuple) and name in before.argval:
            yield None
        before = one
