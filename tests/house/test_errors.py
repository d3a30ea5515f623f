"""vdnn.errors: the messages, the facts behind them, and the conversion of the native core's error kinds."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from pathlib import Path

import pytest

from vdnn import errors
from vdnn.errors import VdnnError, from_native

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30

# One example of each: class, the built-in that it also is, its facts, its whole message.
EXAMPLES: list[tuple[type[VdnnError], type[Exception], dict[str, str | int], str]] = [
    (
        errors.InvalidArgumentError,
        ValueError,
        {"argument": "bytes", "expected": "between 1 byte and 128 TiB", "got": "0"},
        "bytes: expected between 1 byte and 128 TiB, got 0.",
    ),
    (
        errors.DeviceMismatchError,
        ValueError,
        {"what": "stream 3 of device 1", "device": "2 (sim)"},
        "stream 3 of device 1 does not belong to device 2 (sim). Pass an object that this device made, or call the "
        "device that made this one.",
    ),
    (
        errors.ClosedError,
        RuntimeError,
        {"what": "the pinned pool", "reason": "it was closed."},
        "the pinned pool can no longer be used: it was closed. Make a new one.",
    ),
    (
        errors.DriverError,
        RuntimeError,
        {"call": "cuMemAlloc_v2", "code_name": "CUDA_ERROR_OUT_OF_MEMORY", "code": 2, "bytes": 64 * 2**20},
        "cuMemAlloc_v2 of 64.00 MiB (67108864 bytes) failed with CUDA_ERROR_OUT_OF_MEMORY (2). The device still works.",
    ),
    (
        errors.DeviceLostError,
        RuntimeError,
        {
            "call": "cuEventQuery",
            "code_name": "CUDA_ERROR_ILLEGAL_ADDRESS",
            "code": 700,
            "first_call": "cuStreamSynchronize",
        },
        "cuEventQuery failed because the device is lost: CUDA_ERROR_ILLEGAL_ADDRESS (700), first reported "
        "by cuStreamSynchronize. An earlier operation failed on the device, and its memory cannot be trusted. "
        "Restart the process; CUDA_LAUNCH_BLOCKING=1 finds the kernel at fault.",
    ),
    (
        errors.DriverUnavailableError,
        RuntimeError,
        {"library": "libcuda.so.1", "reason": "it could not be opened"},
        "no CUDA device can be used through libcuda.so.1: it could not be opened. `vdnn doctor` shows what was found.",
    ),
    (
        errors.BudgetError,
        ValueError,
        {"budget_bytes": 2 * GIB, "least_bytes": 3 * GIB, "where": "point 7", "resident_bytes": GIB},
        "budget 2.00 GiB cannot be met: 3.00 GiB are needed at point 7, even with everything offloaded; 1.00 GiB were "
        "allocated when the step began. Raise the budget to 3.00 GiB (3221225472 bytes), or make the batch smaller.",
    ),
    (
        errors.BudgetError,
        ValueError,
        {
            "budget_bytes": 2 * GIB,
            "least_bytes": 3 * GIB,
            "where": "point 7",
            "resident_bytes": GIB,
            "foreseen": "The first save is [64, 8]",
        },
        "budget 2.00 GiB cannot be met: at least 3.00 GiB are needed at point 7, even with everything offloaded; "
        "1.00 GiB were allocated when the step began. The first save is [64, 8]. Raise the budget, or make the batch "
        "smaller.",
    ),
    (
        errors.RehearsalError,
        RuntimeError,
        {
            "doing": "calling it",
            "problem": "KeyError: 'x'.",
            "place": "my.py:7, in f: b['x']",
            "advice": "Run it",
        },
        "calling it failed: KeyError: 'x'\n  at my.py:7, in f: b['x']\n  Run it.",
    ),
    (
        errors.OperandModifiedError,
        RuntimeError,
        {
            "recomputed": "float32 [8, 16] saved in ReLU",
            "recipe": "relu <- batch_norm",
            "operand": "torch.FloatTensor [16]",
            "found": 2,
            "expected": 1,
        },
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        "[torch.FloatTensor [16]] is at version 2; expected version 1 instead. vdnn recomputes float32 [8, 16] "
        "saved in ReLU from it, by relu <- batch_norm. Modify it after the backward pass, or use "
        "vdnn.offload(recompute=False).",
    ),
    (
        errors.RecomputeError,
        RuntimeError,
        {
            "storages": 2,
            "first": "float32 [8, 16] saved in ReLU",
            "recipe": "relu <- batch_norm",
            "step": 70,
            "since": 65,
        },
        "2 storages were recomputed with other bytes than were discarded, in step 70; the first is float32 [8, 16] "
        "saved in ReLU, by relu <- batch_norm. The gradients are wrong in step 70, and may be wrong since step 65: "
        "return to a checkpoint from before that step. The program modified an operand between forward and backward "
        "in a way that vdnn cannot see, such as a write to a parameter through .data. This process does not follow "
        "the recipe again; vdnn.offload(recompute=False) follows none.",
    ),
    (
        errors.IntegrityError,
        RuntimeError,
        {"storages": 2, "first": "4096 bytes saved as number 3", "step": 5},
        "2 storages were reloaded with other bytes than were offloaded, in step 5; the first is 4096 bytes saved as "
        "number 3. The gradients of this step are wrong: do not use them. Memory or the link may be at fault, or "
        "something wrote to a storage while it was on the host.",
    ),
    (
        errors.PinnedMemoryError,
        MemoryError,
        {
            "requested_bytes": 2 * GIB,
            "pinned_bytes": 3 * GIB,
            "cap_bytes": 4 * GIB,
            "reason": "the cap is reached",
        },
        "cannot pin 2.00 GiB of host memory: the cap is reached. 3.00 GiB are pinned already and the cap is "
        "4.00 GiB. Raise the cap, or offload less.",
    ),
    (
        errors.KernelUnavailableError,
        RuntimeError,
        {"kernel": "vdnn_pack_bits", "reason": "built without nvcc"},
        "the kernel vdnn_pack_bits cannot run: built without nvcc. `vdnn doctor` lists the kernels.",
    ),
    (
        errors.OrderingError,
        RuntimeError,
        {
            "range_address": 0x7F00,
            "range_bytes": 4096,
            "first": "write 'reload'",
            "first_stream": "h2d",
            "second": "read 'conv'",
            "second_stream": "compute",
            "missing": "a wait of compute on an event of h2d",
        },
        "race on 4.00 KiB at 0x7f00: write 'reload' on stream h2d and read 'conv' on stream compute are not "
        "ordered. "
        "Missing: a wait of compute on an event of h2d.",
    ),
    (
        errors.TorchMissingError,
        ImportError,
        {"found": "no torch is installed", "needed": "torch>=2.10"},
        "this part of vdnn needs torch>=2.10, but no torch is installed: run pip install 'torch>=2.10'.",
    ),
    (
        errors.CoreMissingError,
        ImportError,
        {"folder": "/src/vdnn"},
        "this part of vdnn needs its native core, which is not in /src/vdnn: that is source that was not built. "
        "Run Python in another folder to use the installed vdnn, or run `make build` there.",
    ),
    (
        errors.LibraryMissingError,
        ImportError,
        {"what": "vdnn.integrations.lightning", "library": "lightning", "extra": "lightning"},
        "vdnn.integrations.lightning needs lightning, which is not installed: run pip install 'vdnn[lightning]', or "
        "pip install lightning.",
    ),
    (
        errors.FormatError,
        ValueError,
        {"where": "run/cells.jsonl, line 3", "problem": "expected true or false, got 2."},
        "run/cells.jsonl, line 3: expected true or false, got 2.",
    ),
    (
        errors.CombinationError,
        ValueError,
        {"ours": "vdnn", "theirs": "two GPUs", "reason": "hooks belong to one thread", "way_out": "Use torchrun"},
        "vdnn does not work with two GPUs: hooks belong to one thread. Use torchrun.",
    ),
    (
        errors.RankError,
        RuntimeError,
        {"rank": 3, "ranks": 8, "reason": "budget 1.00 GiB cannot be met."},
        "rank 3 of 8 cannot continue: budget 1.00 GiB cannot be met. All ranks stop here, between two steps, so that "
        "none waits for it.",
    ),
]
NATIVE_KINDS = {
    "InvalidArgument": errors.InvalidArgumentError,
    "DeviceMismatch": errors.DeviceMismatchError,
    "Closed": errors.ClosedError,
    "DriverFailure": errors.DriverError,
    "DeviceLost": errors.DeviceLostError,
    "DriverUnavailable": errors.DriverUnavailableError,
    "PinnedMemoryFull": errors.PinnedMemoryError,
    "KernelUnavailable": errors.KernelUnavailableError,
    "OrderingViolation": errors.OrderingError,
}
by_class = pytest.mark.parametrize(
    ("kind", "builtin", "facts", "sentence"), EXAMPLES, ids=[example[0].__name__ for example in EXAMPLES]
)


def facts_of(kind: type[VdnnError]) -> dict[str, str | int]:
    return next(facts for known, _, facts, _ in EXAMPLES if known is kind)


@by_class
def test_the_sentence_says_what_was_expected_and_what_came(
    kind: type[VdnnError], builtin: type[Exception], facts: dict[str, str | int], sentence: str
) -> None:
    error = kind(**facts)
    assert str(error) == sentence
    assert isinstance(error, VdnnError)
    assert isinstance(error, builtin)
    assert {name: getattr(error, name) for name in facts} == facts


@by_class
@pytest.mark.parametrize("way", ["pickle", "copy", "deepcopy"])
def test_an_error_survives_pickle_and_copy(
    kind: type[VdnnError], builtin: type[Exception], facts: dict[str, str | int], sentence: str, way: str
) -> None:
    error = kind(**facts)
    ways = {"pickle": lambda e: pickle.loads(pickle.dumps(e)), "copy": copy.copy, "deepcopy": copy.deepcopy}
    again = ways[way](error)
    assert type(again) is kind
    assert str(again) == sentence
    assert {name: getattr(again, name) for name in facts} == facts


def test_every_class_has_an_example_here() -> None:
    public = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, VdnnError)}
    assert public == {example[0] for example in EXAMPLES} | {VdnnError}


@pytest.mark.parametrize("native", sorted(NATIVE_KINDS))
def test_a_native_kind_becomes_its_class(native: str) -> None:
    kind = NATIVE_KINDS[native]
    error = from_native(native, facts_of(kind))
    assert type(error) is kind
    assert str(error) == str(kind(**facts_of(kind)))


def declared_kinds(header: str) -> set[str]:
    return set(re.findall(r"struct (\w+) final : Error", header))


def test_every_kind_the_native_core_declares_is_mapped() -> None:
    headers = "".join(path.read_text() for path in sorted((ROOT / "csrc").rglob("*.h")))
    declared = declared_kinds(headers)
    assert len(declared) >= 8
    assert declared <= set(NATIVE_KINDS)


def test_the_native_facts_have_the_names_that_the_classes_take() -> None:
    declared = (ROOT / "csrc" / "device" / "errors.h").read_text()
    for native, parameters in re.findall(r"^  (\w+)\((std::[^;]*)\);", declared, re.MULTILINE | re.DOTALL):
        names = re.findall(r"(\w+)(?:,|$)", parameters)
        assert set(names) == set(facts_of(NATIVE_KINDS[native])), native


def test_a_kind_without_words_is_shown_with_its_facts() -> None:
    error = from_native("SolarFlare", {"strength": 9})
    assert type(error) is VdnnError
    assert "SolarFlare" in str(error)
    assert "strength=9" in str(error)


def test_facts_that_do_not_fit_their_kind_are_not_lost() -> None:
    error = from_native("Closed", {"what": "pool", "colour": "blue"})
    assert type(error) is VdnnError
    assert "colour='blue'" in str(error)


def test_a_driver_call_without_a_size_names_none() -> None:
    error = errors.DriverError(call="cuInit", code_name="CUDA_ERROR_NO_DEVICE", code=100, bytes=0)
    assert str(error) == "cuInit failed with CUDA_ERROR_NO_DEVICE (100). The device still works."


def test_a_pool_without_a_cap_says_so() -> None:
    error = errors.PinnedMemoryError(requested_bytes=1, pinned_bytes=0, cap_bytes=0, reason="mmap: no memory")
    assert "there is no cap" in str(error)


def test_notes_added_to_an_error_survive_pickle() -> None:
    error = errors.ClosedError(what="pool", reason="closed")
    error.__dict__["__notes__"] = ["in layers.3"]
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["in layers.3"]


# RuntimeError is for broken invariants inside vdnn, and where torch would raise it. The two signals are raised and
# caught inside the package.
OTHER_ERRORS = {"ValueError", "TypeError", "RuntimeError", "AttributeError", "LookupError", "NotImplementedError"}
SIGNALS = {"CannotSearch", "NotSeen", "UnknownLayoutError"}


def test_errors_are_of_one_tree_or_about_arguments_and_only_signals_are_defined_elsewhere() -> None:
    allowed = {example[0].__name__ for example in EXAMPLES} | {"VdnnError"} | OTHER_ERRORS | SIGNALS
    raised, defined = set(), set()
    for path in sorted((ROOT / "vdnn").rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if re.search(r"\braise\b|(Error|Exception)\)", text) else ():
            if isinstance(node, ast.Raise):
                made = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                if isinstance(made, ast.Name) and made.id[0].isupper():
                    raised.add(made.id)
            elif isinstance(node, ast.ClassDef) and path.name != "errors.py":
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                if any(base.endswith(("Error", "Exception")) for base in bases):
                    defined.add(node.name)
    assert {"BudgetError", "ValueError", "NotSeen"} <= raised
    assert raised <= allowed
    assert defined == SIGNALS
