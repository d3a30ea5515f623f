"""The native core of vdnn: devices, pinned memory, transfers, codecs and the search for plans. Does not need torch.

Addresses and sizes are ints, in bytes; times are ints, in nanoseconds. Every call may be made from any thread; calls
that may block release the GIL first. "Ordered on" a stream means that the work runs after everything issued to that
stream before, and that the caller does not wait. Errors are classes of vdnn.errors. This file is the reviewed
description of the extension; docs/device.md explains how the parts work together.
"""
# ruff: noqa: N999  (the module has the name of the extension)

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, ClassVar, Final, TypedDict, final, overload, type_check_only

import typing_extensions
from typing_extensions import Never, Self

DEFAULT_DRIVER_LIBRARY: Final[str]

@type_check_only
class _NativeType(type):
    """The metaclass of every class in this module."""

@type_check_only
class _Native(metaclass=_NativeType):
    """A class that only the core constructs: calling it raises TypeError."""

    def __init__(self, *args: Never, **kwargs: Never) -> None: ...

@type_check_only
class _NativeEnum(metaclass=_NativeType):
    """What the enumerations here share. They are not enum.Enum: compare with `==`, list `__members__`."""

    __members__: ClassVar[dict[str, Self]]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...
    def __init__(self, value: int) -> None: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...

@type_check_only
class _DriverStatus(TypedDict):
    library: str
    loaded: bool
    reason: str
    version: int
    device_count: int

class Kernel(_NativeEnum):
    """The codec's kernels."""

    PACK_BITS: ClassVar[Kernel]
    UNPACK_BITS: ClassVar[Kernel]
    CONTENT_HASH: ClassVar[Kernel]

class KernelCall(_Native):
    """One call of a codec kernel, checked when constructed. The caller keeps the memory that it names alive."""

    @property
    def kernel(self) -> Kernel: ...
    @property
    def source(self) -> int: ...
    @property
    def target(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def source_bytes(self) -> int: ...
    @property
    def target_bytes(self) -> int: ...
    def __init__(self, kernel: Kernel, source: int, target: int, count: int) -> None: ...

def run_on_cpu(call: KernelCall) -> None:
    """Runs the CPU reference on the calling thread; source and target must be host memory. Blocks."""

def device_code_present() -> bool:
    """True if this build contains the CUDA kernels."""

def device_code_missing_reason() -> str:
    """Why this build lacks the CUDA kernels, as a sentence; "" if it has them."""

class Stream(_Native):
    """Names a stream of one device. A value: equal values name the same stream; a copy names it too."""

    @property
    def device_id(self) -> int: ...
    @property
    def index(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

class Event(_Native):
    """The point that a stream had reached when the event was recorded. Immutable. `Event()` is empty and has always
    happened.
    """

    @property
    def empty(self) -> bool: ...
    @property
    def stream(self) -> Stream | None: ...
    def __init__(self) -> None: ...

class DeviceInfo(_Native):
    """Properties of a device. `compute_capability` is 90 for 9.0; a `numa_node` of -1 is unknown."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def compute_capability(self) -> int: ...
    @property
    def numa_node(self) -> int: ...
    @property
    def integrated(self) -> bool: ...
    @property
    def pci_bus_id(self) -> str: ...

class CopyDirection(_NativeEnum):
    """The direction of a copy: which side is pinned host memory."""

    DEVICE_TO_HOST: ClassVar[CopyDirection]
    HOST_TO_DEVICE: ClassVar[CopyDirection]

class Access(_NativeEnum):
    """How an operation accesses a range. A release counts as a write: the next owner may write the memory at once."""

    READ: ClassVar[Access]
    WRITE: ClassVar[Access]
    RELEASE: ClassVar[Access]

class Schedule(_NativeEnum):
    """When a simulated stream runs an operation that may run: at once, when needed, or as drawn from the seed."""

    EAGER: ClassVar[Schedule]
    LAZY: ClassVar[Schedule]
    RANDOM: ClassVar[Schedule]

class Device(_Native):
    """The interface to hardware. CudaDevice and SimDevice implement it; OrderingChecker wraps either."""

    @property
    def info(self) -> DeviceInfo: ...
    @property
    def closed(self) -> bool: ...
    def create_stream(self, name: str) -> Stream:
        """Creates a stream that does not synchronize with the legacy default stream. It lives until close()."""
    def adopt_stream(self, native_handle: int = 0) -> Stream:
        """Names a stream that the caller owns and keeps alive. The same handle returns the same Stream."""
    def stream_name(self, stream: Stream) -> str: ...
    def record(self, stream: Stream, timing: bool = False) -> Event:
        """Marks the end of the work issued to `stream` so far. Does not block."""
    def wait(self, stream: Stream, event: Event) -> None:
        """Work issued to `stream` from now on runs after `event`. Blocks only on an adopted stream of a SimDevice."""
    def query(self, event: Event) -> bool:
        """True if `event` has happened. Does not block."""
    def synchronize(self, event: Event) -> None:
        """Blocks the calling thread until `event` has happened."""
    def drain(self, stream: Stream) -> None:
        """Blocks the calling thread until the work issued to `stream` so far has run."""
    def elapsed_ns(self, begin: Event, end: Event) -> int:
        """The time from one timed event to another. Blocks until both have happened."""
    def copy_async(self, target: int, source: int, bytes: int, direction: CopyDirection, stream: Stream) -> None:
        """Issues a copy, ordered on `stream`. The host range must be pinned by this device. The caller neither frees
        nor changes the ranges until an event recorded after this call has happened.
        """
    def launch(self, call: KernelCall, stream: Stream) -> None:
        """Issues a codec kernel, ordered on `stream`. The caller keeps its memory as for copy_async."""
    def allocate_pinned(self, bytes: int) -> int:
        """Allocates page-locked host memory; the caller owns it until free_pinned. Blocks; may take milliseconds."""
    def free_pinned(self, address: int) -> None:
        """Unpins and frees the pages. Blocks until no copy can access them."""
    def allocate_device(self, bytes: int) -> int:
        """Allocates device memory outside torch's allocator, for probes and tests. The caller owns it until
        free_device.
        """
    def free_device(self, address: int) -> None:
        """Frees device memory. Blocks until the device no longer uses it."""
    def note_access(self, address: int, bytes: int, access: Access, stream: Stream, label: str = "note") -> None:
        """Reports how work of another library (torch), ordered on `stream`, accesses a range. A GPU ignores it."""
    def close(self) -> None:
        """Finishes the work on the device's own streams and frees everything it owns. Blocks. Idempotent."""

class CudaDevice(Device):
    """A GPU through the driver API, in the primary context shared with torch."""

    def __init__(self, ordinal: int = 0, library: str = "libcuda.so.1") -> None: ...

class LinkModel(_Native):
    """The link of a simulated device. A copy takes the latency, and then its bytes at the rate available to it."""

    @property
    def to_host_bytes_per_s(self) -> float: ...
    @property
    def to_device_bytes_per_s(self) -> float: ...
    @property
    def duplex_bytes_per_s(self) -> float: ...
    @property
    def latency_ns(self) -> int: ...
    def __init__(
        self,
        to_host_bytes_per_s: float = 12.8e9,
        to_device_bytes_per_s: float = 12.8e9,
        duplex_bytes_per_s: float = 25.6e9,
        latency_ns: int = 10000,
    ) -> None: ...

class SimDevice(Device):
    """A device made of host threads: real ordering, virtual time. Without `moves_bytes` it only keeps time."""

    def __init__(
        self,
        schedule: Schedule = ...,
        seed: int = 0,
        poison: bool = True,
        moves_bytes: bool = True,
        link: LinkModel = ...,
        name: str = "simulated device",
        total_bytes: int = 17179869184,
    ) -> None: ...
    def advance(self, stream: Stream, duration_ns: int) -> None:
        """Advances `stream` by `duration_ns` of computation, in virtual time. Does not block."""
    def now_ns(self, stream: Stream) -> int:
        """The virtual time at which `stream` finishes the work issued to it."""
    def stall_ns(self, stream: Stream) -> int:
        """How long `stream` has waited for other streams, in virtual time."""
    def set_eager(self, stream: Stream, eager: bool) -> None:
        """Makes `stream` run at once, or only when needed. Not for Schedule.RANDOM."""
    def runnable(self) -> list[Stream]:
        """The device's own streams whose next operation may run now. For exploring schedules under Schedule.LAZY."""
    def run_one(self, stream: Stream) -> None:
        """Runs the next operation of `stream`. Blocks until it has run."""
    def event_ns(self, event: Event) -> int:
        """The virtual time of `event`. Does not wait and does not change any time."""

def sim_table(device: Device) -> typing_extensions.CapsuleType:
    """The functions that the deferred accelerator calls on a SimDevice, or on a checker of one, as a capsule."""

class OnViolation(_NativeEnum):
    """What an OrderingChecker does with a violation: raise it, or collect it."""

    RAISE: ClassVar[OnViolation]
    COLLECT: ClassVar[OnViolation]

class OrderingViolation(_Native):
    """Two accesses to the same bytes that nothing orders. `missing` names the missing wait, as a sentence."""

    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def first(self) -> str: ...
    @property
    def first_stream(self) -> str: ...
    @property
    def second(self) -> str: ...
    @property
    def second_stream(self) -> str: ...
    @property
    def first_issued_at(self) -> str: ...
    @property
    def second_issued_at(self) -> str: ...
    @property
    def missing(self) -> str: ...

class OrderingChecker(Device):
    """Wraps `device` and checks every access made through the wrapper. `close()` closes the wrapped device."""

    @property
    def inner(self) -> Device: ...
    @property
    def checked_accesses(self) -> int: ...
    def __init__(self, device: Device, on_violation: OnViolation = ...) -> None: ...
    def set_origin(self, origin: str) -> None:
        """Sets the program location of the calling thread from now on. Violations report it in `first_issued_at` and
        `second_issued_at`.
        """

    def take_violations(self) -> list[OrderingViolation]:
        """The violations collected since the last call."""

class IssueLog(Device):
    """Wraps `device` and logs what is issued to its streams: "record s1 e3", "wait s2 e3", "copy_d2h s1 4096".
    Streams and records are numbered by first mention. `close()` closes the wrapped device.
    """

    def __init__(self, device: Device) -> None: ...
    def take_issues(self) -> list[str]:
        """The issues logged since the last call, in order."""

def driver_status(library: str = "libcuda.so.1") -> _DriverStatus:
    """Reports if the driver can be loaded, its version (12040 for 12.4) and its devices; if not, the reason."""

class HostLimits(_Native):
    """The resources and limits of the host. None means that the host sets no such limit."""

    @property
    def total_bytes(self) -> int: ...
    @property
    def available_bytes(self) -> int: ...
    @property
    def cgroup_limit_bytes(self) -> int | None: ...
    @property
    def cgroup_used_bytes(self) -> int | None: ...
    @property
    def memlock_limit_bytes(self) -> int | None: ...
    @property
    def numa_nodes(self) -> int: ...
    @property
    def huge_page_bytes(self) -> int: ...
    @property
    def huge_pages_free(self) -> int: ...
    @property
    def transparent_huge_pages(self) -> str: ...

def host_limits(root: str = "/") -> HostLimits:
    """Reads /proc and /sys below `root`. A missing file leaves its fact unknown."""

def free_parked() -> None:
    """Frees what devices, pools and queues left that were dropped without close(). Waits for copies that still run. The
    main thread does the same by itself, soon after they were dropped.
    """

def default_pinned_cap_bytes(limits: HostLimits) -> int:
    """Four fifths of the free host memory, by the tighter of machine and cgroup."""

class Growth(_NativeEnum):
    """What an allocation does when the pool is full: pin now and block, or return None and grow in the background."""

    NOW: ClassVar[Growth]
    LATER: ClassVar[Growth]

class PoolStats(_Native):
    """A snapshot. `live` counts requested bytes, `pinned` bytes taken from the system; peaks cover the pool's life."""

    @property
    def live_bytes(self) -> int: ...
    @property
    def live_peak_bytes(self) -> int: ...
    @property
    def pinned_bytes(self) -> int: ...
    @property
    def pinned_peak_bytes(self) -> int: ...
    @property
    def cap_bytes(self) -> int: ...
    @property
    def slabs(self) -> int: ...
    @property
    def blocks_given(self) -> int: ...
    @property
    def growths_awaited(self) -> int: ...
    @property
    def growths_ahead(self) -> int: ...
    @property
    def slabs_given_back(self) -> int: ...
    @property
    def refusals(self) -> int: ...
    @property
    def last_growth_error(self) -> str: ...

class PinnedBlock(_Native):
    """A lease of host memory. Dropping the last reference returns it, without a lock or a driver call."""

    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def last_uses(self) -> list[Event]:
        """A stream that writes the block must wait for these events first."""
    def note_use(self, event: Event) -> None:
        """Records that a read or write of the block ends at `event`. One thread at a time."""

class PinnedPool(_Native):
    """Pinned host memory in slabs, leased in exact sizes, reused behind events, under a hard cap."""

    @property
    def stats(self) -> PoolStats: ...
    def __init__(self, device: Device, cap_bytes: int = 0, slab_bytes: int = 1048576, slack: float = 1.05) -> None: ...
    @overload
    def allocate(self, bytes: int) -> PinnedBlock:
        """Leases a block until the caller drops it. Blocks while memory is pinned; raises if it cannot be."""
    @overload
    def allocate(self, bytes: int, growth: Growth = ...) -> PinnedBlock | None:
        """With Growth.LATER it never blocks: it returns None if the pool is full, and the pool's thread grows it."""
    def reserve(self, bytes: int) -> None:
        """Makes the pool's thread pin memory until `bytes` are pinned. Does not block."""
    def wait_for_growth(self) -> None:
        """Blocks until the pool's thread has pinned, or failed to pin, everything requested of it."""
    def trim(self, kept_bytes: int = 0) -> int:
        """Frees idle slabs until no more than `kept_bytes` are pinned, and returns the number of freed bytes. Blocks
        until their last uses are over."""
    def room_bytes(self, block_bytes: int) -> int:
        """How many bytes blocks of `block_bytes` can still take under the cap, beside the blocks that are leased."""
    def close(self) -> None:
        """Unpins everything; blocks that are still held lose their memory. Blocks. Idempotent."""

class CopyState(_NativeEnum):
    """Queued in a batch, submitted to the copy stream, or failed, in which case the source is the only copy."""

    QUEUED: ClassVar[CopyState]
    SUBMITTED: ClassVar[CopyState]
    FAILED: ClassVar[CopyState]

class HostCopy(_Native):
    """An offloaded copy. May be dropped at any moment: the queue keeps the memory that a running copy accesses."""

    @property
    def bytes(self) -> int: ...
    @property
    def block(self) -> PinnedBlock: ...

class Reload(_Native):
    """A reload in flight. May be dropped at any moment."""

    @property
    def bytes(self) -> int: ...
    @property
    def span(self) -> tuple[Event, Event]:
        """The events before and after the copy. The first is empty unless the queue is timed."""

class QueueStats(_Native):
    """A snapshot. `submissions` counts a batch once; `cancelled` counts copies dropped before they were submitted."""

    @property
    def offloads(self) -> int: ...
    @property
    def offloaded_bytes(self) -> int: ...
    @property
    def reloads(self) -> int: ...
    @property
    def reloaded_bytes(self) -> int: ...
    @property
    def submissions(self) -> int: ...
    @property
    def offload_in_flight_bytes(self) -> int: ...
    @property
    def reload_in_flight_bytes(self) -> int: ...
    @property
    def window_waits(self) -> int: ...
    @property
    def refused_offloads(self) -> int: ...
    @property
    def cancelled(self) -> int: ...
    @property
    def failed(self) -> int: ...

class TransferQueue(_Native):
    """Offloads and reloads on two copy streams of its own; the bytes of offloads in flight are limited by a window.
    Does not block on a GPU except where a method says so. A keepalive is any object; the queue drops it on a thread
    that called the queue.
    """

    @property
    def stats(self) -> QueueStats: ...
    @property
    def offload_stream(self) -> Stream: ...
    @property
    def reload_stream(self) -> Stream: ...
    def __init__(
        self,
        device: Device,
        pool: PinnedPool,
        offload_window_bytes: int = 536870912,
        small_copy_bytes: int = 65536,
        batch_bytes: int = 1048576,
        timed: bool = False,
    ) -> None: ...
    def offload(
        self,
        source: int,
        bytes: int,
        producer: Stream,
        owner: Stream | None = None,
        keepalive: object = None,
        growth: Growth = ...,
    ) -> HostCopy | None:
        """Copies to the host once `producer` has reached this point. `owner` (by default `producer`) is the stream that
        allocated the source. The queue holds `keepalive` until take_released() returns it. Blocks only to pin memory;
        returns None only with Growth.LATER.
        """
    def release(self, copy: HostCopy) -> bool:
        """Makes the owner stream wait for the copy and releases the source. Idempotent. False if the copy failed."""
    def reload(self, copy: HostCopy, target: int, consumer: Stream, keepalive: object = None) -> Reload:
        """Copies into [target, +copy.bytes), allocated on `consumer`, once `consumer` has reached this point. Holds
        `keepalive` until a stream waits for the reload.
        """
    def wait(self, reload: Reload, stream: Stream) -> None:
        """Makes `stream` wait for the reload."""
    def flush(self) -> None:
        """Submits the copies that wait in a batch."""
    def collect(self) -> None:
        """Releases copies whose handles were dropped. Most calls do this too."""
    def ready(self, copy: HostCopy) -> Event:
        """The event after which the host may read the block. Submits the copy if it waits in a batch."""
    def span(self, copy: HostCopy) -> tuple[Event, Event]:
        """The events before and after the copy; the first is empty unless the queue is `timed`. Submits it too."""
    def set_offload_window(self, bytes: int) -> None:
        """The next offload applies a smaller window to the copies in flight."""
    def state(self, copy: HostCopy) -> CopyState: ...
    def failure(self, copy: HostCopy) -> tuple[str, object]:
        """The reason and the keepalive of a failed copy; ("", None) for any other."""
    @property
    def may_have_released(self) -> bool:
        """False if take_released() would return nothing and free nothing. Takes no lock."""
    def take_released(self) -> list[object]:
        """The keepalives of released sources, in order of release; they may be dropped now. Collects first."""
    def close(self) -> None:
        """Waits for all copies, returns every reference, then raises the device's error if there was one. Blocks."""

# Planning.

class Room(_Native):
    """The free bytes of each interval of a step. They may be negative."""

    def __init__(self, room_bytes: Sequence[int]) -> None: ...
    def take_down(self, wanted: Sequence[tuple[int, int, int]]) -> list[int]:
        """For each (highest, lowest, bytes) in turn, subtracts `bytes` from interval `highest` and downwards, while an
        interval has that much, at most to `lowest`. Returns for each the interval below the last that was reduced:
        `highest` itself if that one has not enough.
        """

class StepOutcome(_Native):
    """A step under a plan. An absence is (gap, release point, reload point or -1)."""

    @property
    def step_ns(self) -> int: ...
    @property
    def host_ns(self) -> int:
        """The time in which the host issues the step."""
    @property
    def absences(self) -> list[tuple[int, int, int]]: ...
    @property
    def stalls(self) -> list[tuple[int, bool, int, list[int]]]:
        """(gap or -1, True for a reload, ns, gaps whose copies the engine ran just before), in time order."""

class StepModel(_Native):
    """One recorded step, which the search for a plan schedules and replays. See vdnn.planning.search.step_model."""

    def __init__(
        self,
        step: RecordedStep,
        gaps: Sequence[tuple[int, int, int, int, int]],
        link: LinkModel,
        copy_issue_ns: int,
    ) -> None:
        """A gap is (lifetime, use or -1, first and last interval, release point)."""
    def evaluate(
        self,
        may_leave: bytes,
        budget_bytes: int,
        more_room: Sequence[tuple[int, int]] = [],
        in_order: bool = False,
        furthest_first: bool = False,
    ) -> StepOutcome | None:
        """`may_leave` has one byte per gap: nonzero if its storage may be offloaded. Returns None if the budget
        cannot be met with these gaps.
        """
    def cover(self, order: Sequence[int], budget_bytes: int) -> bytes:
        """Flags of the gaps that are left after those of `order` are left out, each if the others still meet the
        budget without it."""
    def replay(self, absences: Sequence[tuple[int, int, int]]) -> StepOutcome: ...
    def peak_bytes(self, absences: Sequence[tuple[int, int, int]]) -> int: ...

class RecomputedStep(_Native):
    """A step with recomputes. `compute_ns` has one entry per interval; `step_ns` is the step without moves."""

    @property
    def step_ns(self) -> int: ...
    @property
    def peak_bytes(self) -> int:
        """The peak when nothing is offloaded."""
    @property
    def least_bytes(self) -> int:
        """The peak when everything is offloaded that can be."""
    def shortest_ns(self, link: LinkModel, budget_bytes: int) -> int:
        """No plan that meets the budget has a shorter step."""
    @property
    def compute_ns(self) -> list[int]: ...
    @property
    def gaps(self) -> list[tuple[int, int, int, int, int | None, int, int]]:
        """The fields of each Gap, in the order of gaps_of()."""
    def model(self, link: LinkModel, copy_issue_ns: int = 0) -> StepModel: ...

class StepTimeline(_Native):
    """The predicted timeline of a plan. See vdnn.planning.simulate."""

    @property
    def step_ns(self) -> int: ...
    @property
    def host_ns(self) -> int:
        """In which the host issues the step."""
    @property
    def peak_bytes(self) -> int: ...
    @property
    def host_stall_ns(self) -> int: ...
    @property
    def marks(self) -> list[tuple[int, int, int, int, int, int, int, int]]:
        """The fields of each Mark."""
    @property
    def copies(self) -> list[tuple[bool, int, int, int, int]]:
        """True for a copy to the host, and the other fields of each Copy."""

class RecordedStep(_Native):
    """A Recording. See vdnn.planning.recorded_step."""

    def __init__(self, recording: object) -> None: ...
    def with_recomputes(self, chosen: Sequence[int]) -> RecomputedStep: ...
    def recomputed(self, chosen: Sequence[int]) -> RecordedStep:
        """The step with these recomputes as a recording of its own, with nothing left to recompute."""
    def candidates(self, by_issue: bool) -> list[int]:
        """The lifetimes that can be recomputed, those first that take the device (or the host) the least time per
        byte."""
    @property
    def points(self) -> list[tuple[int, bool, int | None, int, int, int, int]]:
        """For each point: the point of the step without recomputes or -1, True for a save, lifetime, compute time,
        allocated bytes, peak and issue time."""
    @property
    def lifetimes(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int, int]]:
        """The fields of each Lifetime, without its recompute."""
    @property
    def gaps(self) -> list[tuple[int, int, int, int, int | None, int, int]]:
        """The fields of each Gap, in the order of gaps_of()."""
    @property
    def recomputes(self) -> list[tuple[int, int, int, int, int] | None]:
        """For each lifetime that can be recomputed: compute time, extra and kept bytes, time and bytes of the
        discard."""
    @property
    def peak_bytes(self) -> int:
        """The peak with everything kept."""
    @property
    def least_peaks(self) -> list[int]:
        """The peak of each interval with everything absent that may be."""
    def interval_bytes(self, planned: object) -> list[int]:
        """The peak of each interval with the absences of these PlannedLifetimes."""
    def stored_bytes(self, planned: object, counts: Sequence[bool]) -> list[int]:
        """The bytes at each point of the lifetimes that count."""
    def simulate(self, planned: object, link: LinkModel, copy_issue_ns: int) -> StepTimeline: ...

class SizeCurve(_Native):
    """The curve of numbers through their values at two or three sizes. See vdnn.runtime.steps.resized_steps."""

    def __init__(
        self, *, shares: Sequence[float], pair: tuple[int, int], along_line: float, with_square: float, is_above: bool
    ) -> None: ...
    def values(self, amounts: Sequence[Sequence[int]]) -> list[int]:
        """`amounts` has the numbers of each recorded step."""
    def resized(
        self, steps: Sequence[RecordedStep], more_bytes: Sequence[int], first: Sequence[int]
    ) -> RecordedStep | None:
        """The step that begins with a save of size `first`. None if the steps do not save and use the same in the same
        order. `more_bytes` are added to what each has allocated."""

class PlanSearch(_Native):
    """The search for the plan of one step under one budget. See vdnn.planning.search.plan_search."""

    def __init__(
        self,
        *,
        step: RecordedStep,
        link: LinkModel,
        copy_issue_ns: int,
        budget_bytes: int,
        effort: tuple[float, float, int, int, int, bool],
        known: Sequence[int],
    ) -> None:
        """`effort` has the fields of Effort. `known`: the recomputes of the plan of nearly the same step, or none."""
    def moves(self, chosen: Sequence[int]) -> list[tuple[int, int, int]] | None:
        """The best absences found for the step with these recomputes. None if no plan of it meets the budget."""
    def recomputes(self) -> list[list[int]]:
        """The choices of recomputes with the shortest steps, the shortest first. For very short steps all choices."""
    def all(self) -> list[tuple[int, list[int], list[tuple[int, int, int]]]]:
        """The plan without recomputes and those of recomputes(): the time of the step, the recomputes and the absences,
        the shortest step first."""
    @property
    def evaluations(self) -> int:
        """The number of evaluations so far."""

class BackgroundSearch(_Native):
    """A search on a thread of its own, which never holds the GIL. Deleting it cancels it."""

    def __init__(self, search: PlanSearch) -> None: ...
    def cancel(self) -> None:
        """Ends the search before its next evaluation. Does not block."""
    @property
    def is_done(self) -> bool:
        """Never in a forked child, which does not have the thread."""
    def wait_for(self, seconds: float) -> bool:
        """Waits until the search is done, at most so long. True if it is."""
    @property
    def found(self) -> list[tuple[int, list[int], list[tuple[int, int, int]]]]:
        """The time of the step, the recomputes and the absences of each plan, the shortest step first; none if the
        search was cancelled. Raises what ended the search. Call it once the search is done."""

def local_search(
    *, model: StepModel, budget_bytes: int, kept_ns: int, effort: int, starts: Sequence[tuple[bytes, bool, bool]]
) -> StepOutcome | None:
    """The best step found with `effort` evaluations; None if none of the starts fits the budget. A start has a byte per
    gap, and the two orders of StepModel.evaluate()."""

def first_choices(model: StepModel) -> list[tuple[bytes, bool, bool]]:
    """The starts of a short search."""

class TrainingCycle(_Native):
    """One cycle of a whole training. See vdnn.planning.training.native_cycle."""

    def __init__(
        self,
        *,
        kinds: Sequence[int],
        durations_ns: Sequence[int],
        needed_bytes: Sequence[int],
        outs: Sequence[tuple[int, int, int, int, bool, bool, bool, bool]],
        ins: Sequence[tuple[int, int, int, int, bool, bool, bool, bool]],
        bring_back: Sequence[int],
        cpu_steps: Sequence[tuple[int, int]],
        units: int,
        overlap: int,
        room_share_of_steps: float,
        room_share_of_passes: float,
        clips: bool,
        forward_waits_for_steps: bool,
        delayed_update: bool,
    ) -> None: ...
    def step_ns(self, rates: tuple[float, float, float, float, float, float], budget_bytes: int) -> float:
        """The time of a step. Rates: link to device, to host and both, host memory, CPU; last the latency of a copy."""
    def spans(
        self, rates: tuple[float, float, float, float, float, float], budget_bytes: int
    ) -> list[tuple[int, int, float, float]]:
        """The last cycle: engine (to device, to host, CPU, compute), index, begin and end of each task, copy and step.
        Copies to the device are numbered by their issue."""
    def room(
        self, rates: tuple[float, float, float, float, float, float], budget_bytes: int
    ) -> tuple[list[int], list[int], list[int]]:
        """The bytes on the device at each task, the releases of copies to the host, the issues of those to the
        device."""

@final
class Script:
    """What the gate compares the saves and uses of a settled step with. See vdnn.runtime.steps.step_script."""

    def __new__(cls, events: Sequence[tuple[Any, ...]], /) -> Script: ...
    def resized(self, numbers: tuple[int, ...], events: list[Any], /) -> Script:
        """The same script with other numbers. In this one all sizes and bytes are indices of `numbers`. `events`: what
        Python is given for the saves that the gate moves, with None for all others."""

@final
class KeptSave:
    """The packed form of a save that the gate keeps."""

    @property
    def tensor(self) -> Any: ...
    @property
    def version(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def lifetime(self) -> int: ...
    def replace(self, packed: object, /) -> None:
        """Holds `packed` in place of the tensor from now on. The gate counts the save no more."""

@final
class LightSave:
    """The packed form of a save that the gate moves."""

    def full(self, /) -> Any:
        """Its packed view. Hands its storage over to Python first, if that was not done before."""
    def restore(self, made: Any, /) -> None:
        """Its storage was discarded, and `made` has all its bytes again. Does nothing once it was handed over."""
    @property
    def view(self) -> Any:
        """Its packed view, if its storage was handed over; else None, and the other properties hold."""
    @property
    def is_current(self) -> bool:
        """True if nothing was written to its bytes since the save."""
    @property
    def identity(self) -> int:
        """A number that all saves of its storage have, and no other object."""
    @property
    def native_address(self) -> int: ...
    @property
    def witness(self) -> Any: ...
    @property
    def geometry(self) -> tuple[Any, Any, Any]: ...
    @property
    def whole_geometry(self) -> tuple[Any, Any]:
        """The size and strides of a tensor with all bytes of its storage, in its first save's dtype."""
    @property
    def recipe(self) -> Any:
        """What recomputes its storage, if that was discarded; else None."""
    @property
    def is_missing(self) -> bool:
        """True if it was discarded and has to be recomputed before its next use."""

@final
class LightSource:
    """The source of a storage that the gate moves."""

    def release(self, /) -> None: ...

@final
class Mover:
    """Moves storages for the gate. See csrc/hooks/mover.h."""

    def __new__(cls, *parts: object) -> Mover: ...
    def begin(
        self,
        script: Script,
        queue: TransferQueue,
        device: Device,
        stream: Stream,
        current_stream: Callable[[], object] | None,
        expected: object,
        streams: dict[Stream, None],
        alignment: int,
        is_checked: bool,
        notes_releases: bool,
        /,
    ) -> None: ...
    def end(self, /) -> tuple[int, ...]:
        """Hands over all light storages. Returns what was counted: see Counts in csrc/hooks/mover.h."""
    def python_manages(self, address: int, /) -> None:
        """Hands over the storage of this native object, if it is light."""
    @property
    def has_discarded(self) -> bool:
        """True if a storage that the mover discarded is alive."""
    def discarded(self, /) -> list[LightSave]:
        """The newest save of each storage that the mover discarded and that is alive."""

@final
class RunningModules:
    """Follows the calls of modules. See csrc/hooks/running_modules.h."""

    @property
    def boundaries(self) -> int:
        """How many calls have begun or ended so far."""
    notes_everything: bool  # also while the gate serves a settled step
    needs_boundaries: bool  # settled steps need facts that are noted at calls of modules
    def __new__(cls, *parts: object) -> RunningModules: ...
    def enter(self, module: Any, /) -> None:
        """A call of this module begins on this thread."""
    def leave(self, module: Any, /) -> None: ...
    def stack(self, /) -> list[Any]:
        """The modules that run on this thread, the outermost first: always the same list of a thread."""
    def note(self, before: Callable[[Any], object], settings: TorchSettings, gate: Gate | None, /) -> None:
        """From now on notes facts where calls begin and end: in a step that the gate serves those that are needed.
        Calls `before` with each module whose leaves' versions are to be noted."""
    def note_nothing(self, /) -> None: ...
    def need(self, module: int, facts: int, /) -> None:
        """From now on these facts are noted around the module with this id."""
    def needs(self, /) -> dict[int, int]:
        """The facts that are noted in settled steps, by the id of their module."""
    def notes_all(self, /) -> bool:
        """True if all facts are noted on this thread now."""
    def rest(self, begins: bool, /) -> None:
        """Calls on this thread are not followed from now on, or are again: what is not read at a save is unknown then.
        Telling it twice does nothing."""
    def begin_anew(self, of_thread: object, /) -> None:
        """No module runs any more. The attribute `stack` of `of_thread` is the list of a thread."""

def modules_around(node: int, /) -> list[int]:
    """The ids of the modules at the last module boundary ahead of this node and at the first behind it, where no
    reading of torch's settings is nearer."""

@final
class CountedRecipe:
    """A recipe whose recompute counts as one more use of each operand, until this is freed."""

    def __new__(cls, recipe: Any, /) -> CountedRecipe: ...
    @property
    def recipe(self) -> Any: ...
    @property
    def needs_recomputes(self) -> bool:
        """True if something that it reads has to be recomputed first."""

@final
class WeakStorage:
    """A weak reference to a storage, as torch's StorageWeakRef."""

    def __new__(cls, storage: Any, /) -> WeakStorage: ...
    @property
    def cdata(self) -> int: ...

@final
class UsableSaves:
    """Tells whether a recipe can read a save. The arguments are listed in csrc/hooks/usable_saves.cpp."""

    def __new__(cls, *parts: Any) -> UsableSaves: ...
    def test(self, save: Any, avoided: int, /) -> bool: ...

@final
class PlainRun:
    """Runs a function without graph, autocast and function modes. See csrc/hooks/plain_run.h."""

    def __new__(
        cls,
        set_grad_enabled: Callable[[bool], object],
        is_grad_enabled: Callable[[], bool],
        set_function_state: Callable[[Any], object],
        function_state: Callable[[], Any],
        disabled: Any,
        is_autocast_enabled: Callable[[], bool],
        without_autocast: Callable[[], Any],
        /,
    ) -> PlainRun: ...
    def __call__(self, function: Callable[..., Any], /, *arguments: Any) -> Any: ...

@final
class TorchSettings:
    """Reads torch's settings, and remembers under which of them operations ran. See csrc/hooks/torch_settings.h."""

    def __new__(
        cls,
        getters: tuple[Callable[[], object] | tuple[Callable[[], object], object], ...],
        node_number: Callable[[], int],
        /,
    ) -> TorchSettings:
        """A getter in a tuple has a second element: the value of its setting where it raises RuntimeError."""
    def read(self, /) -> tuple[object, ...]:
        """The present settings, on this thread: lists as tuples. The same object as the last time if none has
        changed."""
    def observe(self, /) -> None:
        """Reads the settings, and notes them for the nodes of this thread."""
    def observe_at_save(self, tensor: Any, /) -> None:
        """Called in a pack hook: the node that was created last has saved something under these settings."""
    def of(self, node: Any, /) -> tuple[object, ...] | None:
        """The settings under which this node's operation ran on this thread, or None if they are not known."""
    def at_save_of(self, node: Any, /) -> tuple[object, ...] | None:
        """The same, if the node has saved something itself; else None."""
    def between_readings_of(self, node: Any, /) -> tuple[object, ...] | None:
        """The same for an operation that rounds once: it is enough that the readings before and after it agree."""
    def were_observed_at_save(self, number: int, /) -> bool:
        """True if the node with this number saved something itself, on this thread, where the settings were read."""

def flushes_denormals() -> bool:
    """True if the CPU takes denormals for zero on this thread."""

def watch_norm_calls(
    norms: tuple[tuple[CodeType, frozenset[str], bool, bool], ...], passing: tuple[CodeType, ...], folder: str, /
) -> None:
    """From now on the calls of these functions are noted. See csrc/hooks/norm_calls.h."""

def fact_of_norm(node: Any, name: str, otherwise: Any, /) -> Any:
    """What the call that made this node was given for `name`; `otherwise` if that is not known."""

def note_saved(node: Any, output_nr: int, packed: Any, /) -> None:
    """Notes that `packed` holds this output of `node`. The note ends when `packed` is freed."""

def noted_save(node: Any, output_nr: int, /) -> Any:
    """The save that holds this output, if there is one that is alive; else None."""

def current_form(packed: Any, /) -> Any:
    """The packed view that has replaced a save of the gate, if one has; else the save."""

def save_in_slot(node: Any, slot: str, unpack: Any, /) -> Any:
    """What the pack hook returned for this raw slot; None if it is empty, released, or packed by another hook."""

@final
class UnplannedSaves:
    """Keeps the saves of steps without a plan for the gate. See csrc/hooks/unplanned_saves.h."""

    def __new__(cls, *parts: object) -> UnplannedSaves: ...
    def open(self, step: object, device: Any, least_bytes: int, /) -> None:
        """From now on the gate keeps the plain saves of this thread. Smaller storages are Python's."""
    def close(self, /) -> None:
        """Further saves are Python's."""
    def end(self, /) -> None:
        """The step is over."""
    def lifetime_at(self, address: int, /) -> int | None:
        """The lifetime of the storage with this native address, alive or not, if the step has kept saves of it."""
    def hand_over(self, lifetime: int, /) -> list[KeptSave]:
        """The saves of a lifetime that are alive, or of all for -1: Python manages their storages from now on. None of
        a storage that was written to."""
    def is_alive(self, lifetime: int, /) -> bool:
        """True if saves of a lifetime of the step that was opened last are alive, and kept."""
    def changes(self, /) -> tuple[list[int], list[int]] | None:
        """The lifetimes that have ended since the last call, and those whose storages nobody else holds any more."""
    @property
    def is_open(self) -> bool: ...

@final
class BackwardCalls:
    """Runs backwards, without a session's hooks where they save nothing. See csrc/hooks/backward_calls.h."""

    def __new__(cls, *functions: object) -> BackwardCalls: ...
    def __call__(self, *arguments: Any, **options: Any) -> Any: ...

def drop_hooks_away(pack_hook: object, /) -> bool:
    """True if a backward of this thread runs without the hooks of this one. They are not installed again then."""

@final
class Gate:
    """The pack and unpack hooks of a session that follows plans. See csrc/hooks/gate.h."""

    calls_python: bool  # the next point that the gate serves is one for Python
    def __new__(cls, *parts: object) -> Gate: ...
    def pack(self, tensor: Any, /) -> Any: ...
    def unpack(self, packed: Any, /) -> Any: ...
    def open(self, script: Script, stack: list[Any] | None, /) -> None:
        """`stack`: the modules that run; None if the step does not follow them."""
    def close(self, /) -> int:
        """Returns the position."""
    def advance(self, /) -> None: ...
    def make_moves(self, position: int, reloads: bool, /) -> None:
        """Issues the releases, or the reloads, of this event that are the mover's."""
    def set_lesson(self, lesson: object, /) -> None: ...
    def measure_host(self, /) -> None:
        """Called in the hook that begins a step. The host is measured from the end of this hook on."""
    def host_times(self, /) -> tuple[int, int, int, int, int, int]:
        """The host is no longer measured. Returns the fields of HostTimes in vdnn/runtime/steps/host_meter.py."""
    def alive(self, /) -> list[int]:
        """The lifetimes of the last step that was opened of which saves are alive."""
    def saves(self, /) -> list[KeptSave]:
        """The kept saves that are alive, of all steps, in the order of saves."""
    @property
    def is_open(self) -> bool: ...
    @property
    def uses_here(self) -> bool:
        """True if the uses of the step run on this thread, as far as is known."""
    @property
    def position(self) -> int: ...
    @property
    def living(self) -> int:
        """The number of kept saves that are alive, of all steps."""
    @property
    def step(self) -> int: ...
    @property
    def kept_bytes(self) -> int:
        """The bytes that are kept for the last step that was opened."""
