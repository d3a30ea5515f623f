"""torch's own databases of operations and modules, with sample inputs, as the identity tests use them.

They are loaded when a test runs, not when it is collected, because the import takes seconds. The import also locks
torch's backend flags for the whole process, which would affect other tests, so they are unlocked again.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.runtime.identity.exclusions import why_excluded

_DTYPES = (torch.float32, torch.float64, torch.complex64)
# The fast suite picks its sample among this many. Making all of them takes longer than running one.
_LOOKED_AT = 64


@dataclass(frozen=True, slots=True)
class OpSample:
    """One call of one operation."""

    name: str  # names the operation and the sample
    call: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]


@functools.cache
def operations() -> tuple[Any, ...]:
    """Every OpInfo with a backward on the CPU, in the database's order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    _unlock_backend_flags()
    _look_for_no_test_case()
    return tuple(op for op in op_db if dtype_of(op) is not None)


@functools.cache
def modules() -> tuple[Any, ...]:
    """Every ModuleInfo, in the database's order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db
    _unlock_backend_flags()
    return tuple(module_db)


def dtype_of(op: Any) -> torch.dtype | None:
    """float32 if the operation has a backward for it, else the next best dtype; None if it has no backward."""
    supported = op.supported_backward_dtypes("cpu") if op.supports_autograd else ()
    return next((dtype for dtype in _DTYPES if dtype in supported), None)


def samples_of(op: Any, dtype: torch.dtype) -> Iterator[OpSample]:
    """All samples that are not excluded."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=True)):
            if why_excluded(op.formatted_name, sample.kwargs) is None:
                name = f"{op.formatted_name} sample {index} {dtype}"
                yield OpSample(name, op, ((sample.input, *sample.args), sample.kwargs))


def largest_sample_of(op: Any, dtype: torch.dtype) -> OpSample | None:
    """The sample with the most elements and no empty tensor, among the first few."""
    return max(itertools.islice(samples_of(op, dtype), _LOOKED_AT), key=_weight, default=None)


def _weight(sample: OpSample) -> tuple[bool, int]:
    sizes = [leaf.numel() for leaf in tree_leaves(sample.arguments) if isinstance(leaf, torch.Tensor)]
    return 0 not in sizes, sum(sizes)


def _unlock_backend_flags() -> None:
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True


def _look_for_no_test_case() -> None:
    """Stops the database from looking for a unittest.TestCase on the stack. It does so for the samples of every
    operation, and reads the source of every frame, which took most of the time of our tests; they use no TestCase."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    for module in (common_utils, core):
        assert hasattr(module, "extract_test_fn"), "torch no longer looks, or elsewhere: see where the time goes now"
        module.extract_test_fn = lambda: None  # type: ignore[attr-defined]
