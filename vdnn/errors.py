"""What can go wrong, as types: each carries its facts as attributes and builds its own sentence from them.

A sentence says what was expected, what came, and what to do; sizes are always in it. The native core throws
kinds and facts and no prose: from_native() turns those into these classes, so the wording is here and nowhere
else. Every class takes its facts as keywords, survives pickle and copy, and is a VdnnError as well as the
built-in exception that code without knowledge of vdnn would catch. Nothing is logged or retried here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vdnn.bytesize import format_bytes


class VdnnError(Exception):
    """The base of every error of this package. `str(error)` is a sentence for a person."""

    def __reduce__(self) -> tuple[Callable[..., VdnnError], tuple[type[VdnnError], str], dict[str, object]]:
        # BaseException would call the class with its sentence as the one positional argument; ours take
        # keywords.
        return _recompute, (type(self), str(self)), dict(self.__dict__)


class InvalidArgumentError(VdnnError, ValueError):
    """A caller's argument is not what the function takes."""

    def __init__(self, *, argument: str, expected: str, got: str) -> None:
        self.argument = argument
        self.expected = expected
        self.got = got
        super().__init__(f"{argument}: expected {_bare(expected)}, got {_bare(got)}.")


class DeviceMismatchError(VdnnError, ValueError):
    """A stream or an event of one device was handed to another."""

    def __init__(self, *, what: str, device: str) -> None:
        self.what = what
        self.device = device
        super().__init__(
            f"{_bare(what)} does not belong to device {_bare(device)}. Pass what this device made, or make "
            "the call on the device that made it."
        )


class ClosedError(VdnnError, RuntimeError):
    """Something was used after close(), or in a forked child."""

    def __init__(self, *, what: str, reason: str) -> None:
        self.what = what
        self.reason = reason
        super().__init__(f"{_bare(what)} can no longer be used: {_bare(reason)}. Make a new one.")


class DriverError(VdnnError, RuntimeError):
    """The driver refused a call; the device still works. `bytes` is 0 where the call has no size."""

    def __init__(self, *, call: str, code_name: str, code: int, bytes: int) -> None:
        self.call = call
        self.code_name = code_name
        self.code = code
        self.bytes = bytes
        size = f" of {format_bytes(bytes)} ({bytes} bytes)" if bytes else ""
        super().__init__(f"{call}{size} failed with {code_name} ({code}). The device still works.")


class DeviceLostError(VdnnError, RuntimeError):
    """An asynchronous error: the device's context is lost, and every later call says so."""

    def __init__(self, *, call: str, code_name: str, code: int, first_call: str) -> None:
        self.call = call
        self.code_name = code_name
        self.code = code
        self.first_call = first_call
        seen = "" if first_call in ("", call) else f", first reported by {first_call}"
        super().__init__(
            f"{call} failed because the device is lost: {code_name} ({code}){seen}. Work that had been "
            "accepted failed on the device, and nothing there can be trusted. Start the process again; "
            "CUDA_LAUNCH_BLOCKING=1 finds the kernel at fault."
        )


class DriverUnavailableError(VdnnError, RuntimeError):
    """No driver library, no device, or one that lacks an entry point."""

    def __init__(self, *, library: str, reason: str) -> None:
        self.library = library
        self.reason = reason
        super().__init__(
            f"no CUDA device can be used through {library}: {_bare(reason.removeprefix(f'{library}: '))}. "
            "`vdnn doctor` shows what was found."
        )


class PinnedMemoryError(VdnnError, MemoryError):
    """Host memory: the cap is reached or the system refused the pages. `cap_bytes` is 0 where there is no
    cap.
    """

    def __init__(self, *, requested_bytes: int, pinned_bytes: int, cap_bytes: int, reason: str) -> None:
        self.requested_bytes = requested_bytes
        self.pinned_bytes = pinned_bytes
        self.cap_bytes = cap_bytes
        self.reason = reason
        cap = f"the cap is {format_bytes(cap_bytes)}" if cap_bytes else "there is no cap"
        super().__init__(
            f"cannot pin {format_bytes(requested_bytes)} of host memory: {_bare(reason)}. "
            f"{format_bytes(pinned_bytes)} are pinned already and {cap}. Raise the cap, or offload less."
        )


class KernelUnavailableError(VdnnError, RuntimeError):
    """Device code that this build or this device does not have."""

    def __init__(self, *, kernel: str, reason: str) -> None:
        self.kernel = kernel
        self.reason = reason
        super().__init__(f"the kernel {kernel} cannot run here: {_bare(reason)}. `vdnn doctor` lists the kernels.")


class OrderingError(VdnnError, RuntimeError):
    """Two accesses to one range of memory that nothing orders: a race, named."""

    def __init__(
        self,
        *,
        range_address: int,
        range_bytes: int,
        first: str,
        first_stream: str,
        second: str,
        second_stream: str,
        missing: str,
    ) -> None:
        self.range_address = range_address
        self.range_bytes = range_bytes
        self.first = first
        self.first_stream = first_stream
        self.second = second
        self.second_stream = second_stream
        self.missing = missing
        super().__init__(
            f"race on {format_bytes(range_bytes)} at {range_address:#x}: {first} on stream {first_stream} "
            f"and {second} on stream {second_stream} are not ordered. Missing: {_bare(missing)}."
        )


class BudgetError(VdnnError, ValueError):
    """No plan stays under the budget. `least_bytes` is the smallest one that some plan stays under."""

    def __init__(self, *, budget_bytes: int, least_bytes: int, where: str, resident_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.where = where
        self.resident_bytes = resident_bytes
        super().__init__(
            f"budget {format_bytes(budget_bytes)} cannot be met: {format_bytes(least_bytes)} are needed at "
            f"{_bare(where)}, even with everything offloaded; {format_bytes(resident_bytes)} were there when the step "
            f"began. Raise the budget to {format_bytes(least_bytes)} ({least_bytes} bytes), or make the batch smaller."
        )


class IntegrityError(VdnnError, RuntimeError):
    """Bytes that came back are not the bytes that left."""

    def __init__(self, *, storages: int, first: str, step: int) -> None:
        self.storages = storages
        self.first = first
        self.step = step
        super().__init__(
            f"{storages} storages came back with other bytes than they left with, in step {step}; the first is "
            f"{_bare(first)}. The gradients of this step are wrong: do not use them. Memory or the link may be at "
            "fault, or something wrote to a storage while it was away."
        )


class OperandModifiedError(VdnnError, RuntimeError):
    """A discarded tensor cannot be recomputed: what it is made of was written to. Begins as autograd's error does,
    which plain PyTorch raises where it has saved that operand.
    """

    def __init__(self, *, recomputed: str, recipe: str, operand: str, found: int, expected: int) -> None:
        self.recomputed = recomputed
        self.recipe = recipe
        self.operand = operand
        self.found = found
        self.expected = expected
        super().__init__(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{_bare(operand)}] is at version {found}; expected version {expected} instead. vdnn recomputes "
            f"{_bare(recomputed)} from it, by {_bare(recipe)}. Write to it after the backward, or use "
            "vdnn.offload(recompute=False)."
        )

    def of(self, recomputed: str) -> OperandModifiedError:
        """The same of a storage that is known by name."""
        facts = {"recipe": self.recipe, "operand": self.operand, "found": self.found, "expected": self.expected}
        return OperandModifiedError(recomputed=recomputed, **facts)  # type: ignore[arg-type]


class RecomputeError(VdnnError, RuntimeError):
    """A recheck found that what was recomputed is not what had been discarded. Steps count from 0; `since` is the first
    that may be concerned.
    """

    def __init__(self, *, storages: int, first: str, recipe: str, step: int, since: int) -> None:
        self.storages = storages
        self.first = first
        self.recipe = recipe
        self.step = step
        self.since = since
        concerned = f"step {step}" if since >= step else f"step {step}, and may be wrong since step {since}"
        super().__init__(
            f"{storages} storages were recomputed with other bytes than they had, in step {step}; the first is "
            f"{_bare(first)}, by {_bare(recipe)}. The gradients are wrong in {concerned}: go back to a checkpoint from "
            "before that step. Something that vdnn cannot see was written between forward and backward, such as a "
            "parameter through .data. This recipe is not followed any more in this process; "
            "vdnn.offload(recompute=False) follows none."
        )


class TorchMissingError(VdnnError, ImportError):
    """The runtime was touched where torch is absent or too old. `found` is what was found: a version or a
    reason.
    """

    def __init__(self, *, found: str, needed: str) -> None:
        self.found = found
        self.needed = needed
        super().__init__(f"this part of vdnn needs {needed}, but {_bare(found)}: run pip install '{needed}'.")


class CoreMissingError(VdnnError, ImportError):
    """The package lies in `folder` without its native core: a copy of the source that was not built."""

    def __init__(self, *, folder: str) -> None:
        self.folder = folder
        super().__init__(
            f"this part of vdnn needs its native core, which is not in {folder}: that is source which was not built. "
            "Leave that folder to use the vdnn that is installed, or run `make build` there."
        )


class LibraryMissingError(VdnnError, ImportError):
    """An integration whose library is not installed. `extra` is the one of vdnn that brings it."""

    def __init__(self, *, integration: str, library: str, extra: str) -> None:
        self.integration = integration
        self.library = library
        self.extra = extra
        super().__init__(
            f"{integration} needs {library}, which is not installed: run pip install 'vdnn[{extra}]', or pip install "
            f"{library}."
        )


class CombinationError(VdnnError, ValueError):
    """Two things that do not work together, found before training starts."""

    def __init__(self, *, ours: str, theirs: str, reason: str, way_out: str) -> None:
        self.ours = ours
        self.theirs = theirs
        self.reason = reason
        self.way_out = way_out
        super().__init__(f"{ours} does not work with {theirs}: {_bare(reason)}. {_bare(way_out)}.")


class RankError(VdnnError, RuntimeError):
    """One rank cannot go on, and so none does. Raised on all of them, between two steps."""

    def __init__(self, *, rank: int, ranks: int, reason: str) -> None:
        self.rank = rank
        self.ranks = ranks
        self.reason = reason
        super().__init__(
            f"rank {rank} of {ranks} cannot go on: {_bare(reason)}. All ranks stop here, between two steps, so that "
            "none waits for it."
        )


_FROM_NATIVE: dict[str, Callable[..., VdnnError]] = {
    "InvalidArgument": InvalidArgumentError,
    "DeviceMismatch": DeviceMismatchError,
    "Closed": ClosedError,
    "DriverFailure": DriverError,
    "DeviceLost": DeviceLostError,
    "DriverUnavailable": DriverUnavailableError,
    "PinnedMemoryFull": PinnedMemoryError,
    "KernelUnavailable": KernelUnavailableError,
    "OrderingViolation": OrderingError,
}


def from_native(kind: str, facts: Mapping[str, str | int]) -> VdnnError:
    """The error that the native core threw as (kind, facts). Never raises: a kind or facts that are not known
    here become a plain VdnnError that shows them, since losing the first error to a second one helps
    nobody.
    """
    known = _FROM_NATIVE.get(kind)
    if known is not None:
        try:
            return known(**facts)
        except (TypeError, ValueError):
            pass
    shown = ", ".join(f"{name}={value!r}" for name, value in facts.items())
    return VdnnError(f"the native core reported {kind} ({shown}), which this version of vdnn.errors has no words for.")


def _bare(text: str) -> str:
    """`text` without its closing full stop, to stand inside a sentence."""
    return text.rstrip().removesuffix(".")


def _recompute(kind: type[VdnnError], sentence: str) -> VdnnError:
    """An error as pickle and copy make it: the sentence here, the facts by the state that follows."""
    # Not kind.__new__: the one that MemoryError brings refuses to make a class of several bases.
    return BaseException.__new__(kind, sentence)
