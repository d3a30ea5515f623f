"""The errors of this package. Each class carries its facts as attributes and builds its message from them.

A message says what was expected, what came, and what to do, with sizes. The native core throws kinds and facts without
text, and from_native() turns those into these classes, so all messages are in this module. Every class takes its facts
as keywords, survives pickle and copy, and is a VdnnError as well as the built-in exception that code which does not
know vdnn would catch. This module does not log and does not retry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vdnn.bytesize import format_bytes


class VdnnError(Exception):
    """The base of every error of this package."""

    def __reduce__(self) -> tuple[Callable[..., VdnnError], tuple[type[VdnnError], str], dict[str, object]]:
        # BaseException's __reduce__ calls the class with its message as one positional argument. These take keywords.
        return _restore, (type(self), str(self)), dict(self.__dict__)


class InvalidArgumentError(VdnnError, ValueError):
    """An argument is not one that the function accepts."""

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
            f"{_bare(what)} does not belong to device {_bare(device)}. Pass an object that this device made, or call "
            "the device that made this one."
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
    """An asynchronous error: the device's context is lost, and every later call raises this error again."""

    def __init__(self, *, call: str, code_name: str, code: int, first_call: str) -> None:
        self.call = call
        self.code_name = code_name
        self.code = code
        self.first_call = first_call
        seen = "" if first_call in ("", call) else f", first reported by {first_call}"
        super().__init__(
            f"{call} failed because the device is lost: {code_name} ({code}){seen}. An earlier operation failed on the "
            "device, and its memory cannot be trusted. Restart the process; CUDA_LAUNCH_BLOCKING=1 finds the kernel at "
            "fault."
        )


class DriverUnavailableError(VdnnError, RuntimeError):
    """There is no driver library or no device, or the library lacks an entry point."""

    def __init__(self, *, library: str, reason: str) -> None:
        self.library = library
        self.reason = reason
        super().__init__(
            f"no CUDA device can be used through {library}: {_bare(reason.removeprefix(f'{library}: '))}. "
            "`vdnn doctor` shows what was found."
        )


class PinnedMemoryError(VdnnError, MemoryError):
    """Host memory cannot be pinned: the cap is reached or the system refused the pages. `cap_bytes` is 0 without a
    cap."""

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
    """This build or this device does not have a kernel's device code."""

    def __init__(self, *, kernel: str, reason: str) -> None:
        self.kernel = kernel
        self.reason = reason
        super().__init__(f"the kernel {kernel} cannot run: {_bare(reason)}. `vdnn doctor` lists the kernels.")


class OrderingError(VdnnError, RuntimeError):
    """A race: two accesses to one range of memory that no record and wait order."""

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
    """No plan meets the budget. `least_bytes` is the smallest budget that some plan meets. `foreseen` says on what the
    estimate rests if the step has only begun: `least_bytes` is then a lower bound. `way_out`: what to do, if another
    batch would not help. `earlier_bytes`: held by graphs of earlier steps."""

    def __init__(
        self,
        *,
        budget_bytes: int,
        least_bytes: int,
        where: str,
        resident_bytes: int,
        foreseen: str = "",
        way_out: str = "",
        earlier_bytes: int = 0,
    ) -> None:
        self.budget_bytes, self.least_bytes = budget_bytes, least_bytes
        self.where, self.resident_bytes = where, resident_bytes
        self.foreseen, self.way_out, self.earlier_bytes = foreseen, way_out, earlier_bytes
        earlier = f", {format_bytes(earlier_bytes)} of them held by graphs of earlier steps" if earlier_bytes else ""
        basis = f"{_bare(foreseen)}. " if foreseen else ""
        enough = "" if foreseen else f" to {format_bytes(least_bytes)} ({least_bytes} bytes)"
        super().__init__(
            f"budget {format_bytes(budget_bytes)} cannot be met: {'at least ' if foreseen else ''}"
            f"{format_bytes(least_bytes)} are needed at {_bare(where)}, even with everything offloaded; "
            f"{format_bytes(resident_bytes)} were allocated when the step began{earlier}. "
            f"{basis}{_bare(way_out) or f'Raise the budget{enough}, or make the batch smaller'}."
        )


class RehearsalError(VdnnError, RuntimeError):
    """The user's code raised an error in a rehearsal or an observed step: while `doing` something, at `place`, a line
    of the program."""

    def __init__(self, *, doing: str, problem: str, place: str, advice: str) -> None:
        self.doing, self.problem, self.place, self.advice = doing, problem, place, advice
        at = f"\n  at {place}" if place else ""
        super().__init__(f"{_bare(doing)} failed: {_bare(problem)}{at}\n  {_bare(advice)}.")


class FormatError(VdnnError, ValueError):
    """A file of a run, a recording, a plan or a timeline does not hold what it should. `where` is the file, or a place
    in it."""

    def __init__(self, *, where: str, problem: str) -> None:
        self.where = where
        self.problem = problem
        super().__init__(f"{where}: {_bare(problem)}.")


class IntegrityError(VdnnError, RuntimeError):
    """A reload returned other bytes than were offloaded."""

    def __init__(self, *, storages: int, first: str, step: int) -> None:
        self.storages = storages
        self.first = first
        self.step = step
        super().__init__(
            f"{storages} storages were reloaded with other bytes than were offloaded, in step {step}; the first is "
            f"{_bare(first)}. The gradients of this step are wrong: do not use them. Memory or the link may be at "
            "fault, or something wrote to a storage while it was on the host."
        )


class OperandModifiedError(VdnnError, RuntimeError):
    """A discarded tensor cannot be recomputed, because an operand of its recipe was modified. The message begins like
    the error of autograd that PyTorch raises if it has saved that operand."""

    def __init__(self, *, recomputed: str, recipe: str, operand: str, found: int, expected: int) -> None:
        self.recomputed = recomputed
        self.recipe = recipe
        self.operand = operand
        self.found = found
        self.expected = expected
        super().__init__(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{_bare(operand)}] is at version {found}; expected version {expected} instead. vdnn recomputes "
            f"{_bare(recomputed)} from it, by {_bare(recipe)}. Modify it after the backward pass, or use "
            "vdnn.offload(recompute=False)."
        )

    def of(self, recomputed: str) -> OperandModifiedError:
        """The same error with a name for the recomputed storage."""
        facts = {"recipe": self.recipe, "operand": self.operand, "found": self.found, "expected": self.expected}
        return OperandModifiedError(recomputed=recomputed, **facts)  # type: ignore[arg-type]


class RecomputeError(VdnnError, RuntimeError):
    """A recheck found that a recomputed storage differs from the discarded one. Steps count from 0, and `since` is the
    first that may be affected."""

    def __init__(self, *, storages: int, first: str, recipe: str, step: int, since: int) -> None:
        self.storages = storages
        self.first = first
        self.recipe = recipe
        self.step = step
        self.since = since
        affected = f"step {step}" if since >= step else f"step {step}, and may be wrong since step {since}"
        super().__init__(
            f"{storages} storages were recomputed with other bytes than were discarded, in step {step}; the first is "
            f"{_bare(first)}, by {_bare(recipe)}. The gradients are wrong in {affected}: return to a checkpoint from "
            "before that step. The program modified an operand between forward and backward in a way that vdnn cannot "
            "see, such as a write to a parameter through .data. This process does not follow the recipe again; "
            "vdnn.offload(recompute=False) follows none."
        )


class TorchMissingError(VdnnError, ImportError):
    """The runtime needs torch, which is missing or too old. `found` says which: a version or a reason."""

    def __init__(self, *, found: str, needed: str) -> None:
        self.found = found
        self.needed = needed
        super().__init__(f"this part of vdnn needs {needed}, but {_bare(found)}: run pip install '{needed}'.")


class CoreMissingError(VdnnError, ImportError):
    """The package in `folder` has no native core: it is source that was not built."""

    def __init__(self, *, folder: str) -> None:
        self.folder = folder
        super().__init__(
            f"this part of vdnn needs its native core, which is not in {folder}: that is source that was not built. "
            "Run Python in another folder to use the installed vdnn, or run `make build` there."
        )


class LibraryMissingError(VdnnError, ImportError):
    """`what` needs a library that is not installed. `extra` is vdnn's extra that installs it."""

    def __init__(self, *, what: str, library: str, extra: str) -> None:
        self.what = what
        self.library = library
        self.extra = extra
        super().__init__(
            f"{what} needs {library}, which is not installed: run pip install 'vdnn[{extra}]', or pip install "
            f"{library}."
        )


class CombinationError(VdnnError, ValueError):
    """vdnn and another option or library do not work together. Raised before training starts."""

    def __init__(self, *, ours: str, theirs: str, reason: str, way_out: str) -> None:
        self.ours = ours
        self.theirs = theirs
        self.reason = reason
        self.way_out = way_out
        super().__init__(f"{ours} does not work with {theirs}: {_bare(reason)}. {_bare(way_out)}.")


class RankError(VdnnError, RuntimeError):
    """One rank cannot continue, so no rank does. Raised on all ranks, between two steps."""

    def __init__(self, *, rank: int, ranks: int, reason: str) -> None:
        self.rank = rank
        self.ranks = ranks
        self.reason = reason
        super().__init__(
            f"rank {rank} of {ranks} cannot continue: {_bare(reason)}. All ranks stop here, between two steps, so that "
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
    """The error that the native core threw as (kind, facts).

    Never raises, so that a second error does not hide the first. An unknown kind, or facts that do not fit, become a
    plain VdnnError that shows them.
    """
    known = _FROM_NATIVE.get(kind)
    if known is not None:
        try:
            return known(**facts)
        except (TypeError, ValueError):
            pass
    shown = ", ".join(f"{name}={value!r}" for name, value in facts.items())
    return VdnnError(
        f"the native core reported {kind} ({shown}), which this vdnn.errors does not know. Reinstall vdnn, so that "
        "both are of one version."
    )


def _bare(text: str) -> str:
    """`text` without its final period, for use inside a sentence."""
    return text.rstrip().removesuffix(".")


def _restore(kind: type[VdnnError], message: str) -> VdnnError:
    """Makes an error for pickle and copy, with its message. The state that follows sets its facts."""
    # Not kind.__new__: MemoryError's refuses a class with several bases.
    return BaseException.__new__(kind, message)
