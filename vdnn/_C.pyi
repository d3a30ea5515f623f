"""The native core of vdnn: devices, pinned memory, transfers, codecs and the search for plans. Needs no torch.

Addresses and sizes are ints, in bytes; times are ints, in nanoseconds. Calls may be made from any thread, and
those that may block let go of the GIL first. "Ordered on" a stream means: runs after all that was put on it
before, and the caller does not wait. What goes wrong is a class of vdnn.errors. This file is the reviewed
description of the extension; docs/device.md explains the whole.
"""
# ruff: noqa: N999  (named as the extension is)

from collections.abc import Sequence
from typing import ClassVar, Final, Literal, TypedDict, overload, type_check_only

import typing_extensions
from typing_extensions import Never, Self

DEFAULT_DRIVER_LIBRARY: Final[str]

@type_check_only
class _NativeType(type):
    """The metaclass of everything here."""

@type_check_only
class _Native(metaclass=_NativeType):
    """What the core makes itself: calling the class raises TypeError."""

    def __init__(self, *args: Never, **kwargs: Never) -> None: ...

@type_check_only
class _NativeEnum(metaclass=_NativeType):
    """What every enumeration here has. They are no enum.Enum: compare with `==`, list `__members__`."""

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
    """One call of a codec kernel, checked when made. Borrows the memory it names: the caller keeps it."""

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
    """Runs the CPU reference on the calling thread; source and target are host memory. Blocks."""

def device_code_present() -> bool:
    """True if this build carries the CUDA kernels."""

def device_code_missing_reason() -> str:
    """Why it does not, as a sentence; "" if it does."""

class Stream(_Native):
    """Names a stream of one device. A value: equal ones name the same stream, copying it copies no stream."""

    @property
    def device_id(self) -> int: ...
    @property
    def index(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

class Event(_Native):
    """The point a stream had reached at a record. Immutable; `Event()` is empty and has always happened."""

    @property
    def empty(self) -> bool: ...
    @property
    def stream(self) -> Stream | None: ...
    def __init__(self) -> None: ...

class DeviceInfo(_Native):
    """What a device says of itself. `compute_capability` is 90 for 9.0; `numa_node` -1 is unknown."""

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
    """Which side of a copy is pinned host memory."""

    DEVICE_TO_HOST: ClassVar[CopyDirection]
    HOST_TO_DEVICE: ClassVar[CopyDirection]

class Access(_NativeEnum):
    """What happens to a range. A release is a write: whoever gets the memory next may write it at once."""

    READ: ClassVar[Access]
    WRITE: ClassVar[Access]
    RELEASE: ClassVar[Access]

class Schedule(_NativeEnum):
    """When a simulated stream runs what it may: at once, when somebody needs it, or as the seed says."""

    EAGER: ClassVar[Schedule]
    LAZY: ClassVar[Schedule]
    RANDOM: ClassVar[Schedule]

class Device(_Native):
    """The seam to hardware: CudaDevice and SimDevice implement it, OrderingChecker wraps either."""

    @property
    def info(self) -> DeviceInfo: ...
    @property
    def closed(self) -> bool: ...
    def create_stream(self, name: str) -> Stream:
        """A stream that does not synchronise with the legacy default stream. Lives until close()."""
    def adopt_stream(self, native_handle: int = 0) -> Stream:
        """Names a stream that somebody else owns and keeps alive. The same handle gives the same Stream."""
    def stream_name(self, stream: Stream) -> str: ...
    def record(self, stream: Stream, timing: bool = False) -> Event:
        """Marks the end of what is on `stream` now. Does not block."""
    def wait(self, stream: Stream, event: Event) -> None:
        """Orders `stream` from now on behind `event`. Blocks only on an adopted stream of a SimDevice."""
    def query(self, event: Event) -> bool:
        """True if `event` has happened. Does not block."""
    def synchronize(self, event: Event) -> None:
        """Blocks the calling thread until `event` has happened."""
    def drain(self, stream: Stream) -> None:
        """Blocks the calling thread until all that is on `stream` now has run."""
    def elapsed_ns(self, begin: Event, end: Event) -> int:
        """From one timed event to another. Blocks until both have happened."""
    def copy_async(self, target: int, source: int, bytes: int, direction: CopyDirection, stream: Stream) -> None:
        """Copies, ordered on `stream`. The host range must be pinned by this device. The caller keeps both
        ranges as they are until an event recorded after this call has happened.
        """
    def launch(self, call: KernelCall, stream: Stream) -> None:
        """Runs a codec kernel, ordered on `stream`; the caller keeps its memory as for copy_async."""
    def allocate_pinned(self, bytes: int) -> int:
        """Page-locked host memory, the caller's until free_pinned. Blocks; may take milliseconds."""
    def free_pinned(self, address: int) -> None:
        """Gives the pages back. Blocks until no copy can touch them."""
    def allocate_device(self, bytes: int) -> int:
        """Device memory outside torch's allocator, the caller's until free_device: for probes and tests."""
    def free_device(self, address: int) -> None:
        """Gives device memory back. Blocks until the device has done with it."""
    def note_access(self, address: int, bytes: int, access: Access, stream: Stream, label: str = "note") -> None:
        """Says what somebody else's work, ordered on `stream`, does to a range. A GPU does not act on it."""
    def close(self) -> None:
        """Finishes what is on the device's own streams and gives back all it owns. Blocks. Idempotent."""

class CudaDevice(Device):
    """A GPU through the driver API, in the primary context that it shares with torch."""

    def __init__(self, ordinal: int = 0, library: str = "libcuda.so.1") -> None: ...

class LinkModel(_Native):
    """The link of a simulated device. Each copy takes its latency and then its bytes at the rate it gets."""

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
    """A device made of host threads: real ordering, virtual time. Without `moves_bytes` only time passes."""

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
        """`stream` computes for this long, in virtual time. Does not block."""
    def now_ns(self, stream: Stream) -> int:
        """The virtual time at which `stream` has done all it was given."""
    def stall_ns(self, stream: Stream) -> int:
        """How much of it `stream` stood waiting for other streams."""
    def set_eager(self, stream: Stream, eager: bool) -> None:
        """`stream` runs at once, or only when somebody needs it. Not under Schedule.RANDOM."""
    def runnable(self) -> list[Stream]:
        """Its own streams whose next operation may run now. For exploring schedules, under Schedule.LAZY."""
    def run_one(self, stream: Stream) -> None:
        """Runs the next operation of `stream`, and blocks until it has run."""
    def event_ns(self, event: Event) -> int:
        """The virtual time of `event`. Waits for nothing and changes no time."""

def sim_table(device: Device) -> typing_extensions.CapsuleType:
    """What the deferred accelerator calls of a SimDevice, or of a checker of one, as a capsule."""

class OnViolation(_NativeEnum):
    """What a checker does with a violation."""

    RAISE: ClassVar[OnViolation]
    COLLECT: ClassVar[OnViolation]

class OrderingViolation(_Native):
    """Two accesses to the same bytes that nothing orders. `missing` is the edge, as a sentence."""

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
    """Wraps `device` and checks every access made through it. `close()` closes the wrapped device."""

    @property
    def inner(self) -> Device: ...
    @property
    def checked_accesses(self) -> int: ...
    def __init__(self, device: Device, on_violation: OnViolation = ...) -> None: ...
    def set_origin(self, origin: str) -> None:
        """Where in its program the calling thread is, from now on: violations say so in `first_issued_at` and
        `second_issued_at`."""

    def take_violations(self) -> list[OrderingViolation]:
        """Those collected since the last call."""

class IssueLog(Device):
    """Wraps `device` and writes down what is put on its streams: "record s1 e3", "wait s2 e3", "copy_d2h s1 4096",
    with streams and records numbered by first mention. `close()` closes the wrapped device."""

    def __init__(self, device: Device) -> None: ...
    def take_issues(self) -> list[str]:
        """Those since the last call, in order."""

def driver_status(library: str = "libcuda.so.1") -> _DriverStatus:
    """Whether the driver can be loaded, its version (12040 for 12.4), its devices; else the reason."""

class HostLimits(_Native):
    """What the host has and allows. None: there is no such limit."""

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
    """Reads /proc and /sys below `root`. A file that is missing leaves its fact unknown."""

def default_pinned_cap_bytes(limits: HostLimits) -> int:
    """Four fifths of what is free, by the tighter of machine and cgroup."""

class Growth(_NativeEnum):
    """What an allocation without room does: pin now, blocking, or answer None and have the pool grow."""

    NOW: ClassVar[Growth]
    LATER: ClassVar[Growth]

class PoolStats(_Native):
    """A snapshot. `live` is as requested, `pinned` as taken from the system; peaks are of the pool's life."""

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
    """A lease of host memory. Dropping the last reference gives it back: no lock, no driver call."""

    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def last_uses(self) -> list[Event]:
        """Whoever writes the block makes its stream wait for these first."""
    def note_use(self, event: Event) -> None:
        """A read or write of the block ends at `event`. One thread at a time."""

class PinnedPool(_Native):
    """Pinned host memory in slabs, lent in exact sizes, reused behind events, under a hard cap."""

    @property
    def stats(self) -> PoolStats: ...
    def __init__(self, device: Device, cap_bytes: int = 0, slab_bytes: int = 1048576, slack: float = 1.05) -> None: ...
    @overload
    def allocate(self, bytes: int) -> PinnedBlock:
        """A lease, the caller's until dropped. Blocks while memory is pinned; raises when that is refused."""
    @overload
    def allocate(self, bytes: int, growth: Growth = ...) -> PinnedBlock | None:
        """With Growth.LATER it never blocks: None means not now, and the pool's own thread grows."""
    def reserve(self, bytes: int) -> None:
        """Has the pool's thread pin what is missing for `bytes`. Does not block."""
    def wait_for_growth(self) -> None:
        """Blocks until the pool's thread has pinned, or failed to pin, all it was asked for."""
    def trim(self) -> int:
        """Gives every idle slab back; returns the bytes. Blocks until their last uses are over."""
    def close(self) -> None:
        """Unpins everything; blocks still held keep no memory. Blocks. Idempotent."""

class CopyState(_NativeEnum):
    """Queued in a batch, submitted to the copy stream, or failed: then the source is the only copy."""

    QUEUED: ClassVar[CopyState]
    SUBMITTED: ClassVar[CopyState]
    FAILED: ClassVar[CopyState]

class HostCopy(_Native):
    """A copy off the device. May be dropped at any moment: the queue keeps what a running copy touches."""

    @property
    def bytes(self) -> int: ...
    @property
    def block(self) -> PinnedBlock: ...

class Reload(_Native):
    """A copy on its way back. May be dropped at any moment."""

    @property
    def bytes(self) -> int: ...
    @property
    def span(self) -> tuple[Event, Event]:
        """Runs between these two. The first is empty unless the queue is timed."""

class QueueStats(_Native):
    """A snapshot. `submissions` counts a batch once; `cancelled` were dropped before the device was told."""

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
    def refused_reloads(self) -> int: ...
    @property
    def cancelled(self) -> int: ...
    @property
    def failed(self) -> int: ...

class TransferQueue(_Native):
    """Offloads and reloads on two copy streams of its own, within byte windows. Never blocks on a GPU, save
    where it says so. Keepalives are any objects; the queue drops them on a thread that called it.
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
        reload_window_bytes: int = 536870912,
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
        """Copies off the device once `producer` has come this far. `owner` (else `producer`) allocated the
        source; `keepalive` is held until take_released(). Blocks only to pin; None only with Growth.LATER.
        """
    def release(self, copy: HostCopy) -> bool:
        """Orders the owner stream behind the copy and hands the source back. Idempotent. False: it failed."""
    @overload
    def reload(
        self,
        copy: HostCopy,
        target: int,
        consumer: Stream,
        keepalive: object = None,
        *,
        demand: Literal[True],
    ) -> Reload: ...
    @overload
    def reload(
        self, copy: HostCopy, target: int, consumer: Stream, keepalive: object = None, demand: bool = False
    ) -> Reload | None:
        """Copies into [target, +copy.bytes), allocated on `consumer`, once that has come this far. Holds
        `keepalive` until somebody waited. None when the window is full, unless `demand`.
        """
    def wait(self, reload: Reload, stream: Stream) -> None:
        """Orders `stream` from now on behind the reload."""
    def flush(self) -> None:
        """Submits what waits in a batch."""
    def collect(self) -> None:
        """Takes care of copies whose handles were dropped. Most calls do it too."""
    def ready(self, copy: HostCopy) -> Event:
        """The event after which the host may read the block. Submits the copy if it waits in a batch."""
    def span(self, copy: HostCopy) -> tuple[Event, Event]:
        """The copy runs between these two; the first is empty unless the queue is `timed`. Submits as ready() does."""
    def set_windows(self, offload_bytes: int, reload_bytes: int) -> None:
        """From the next offload or reload on."""
    def state(self, copy: HostCopy) -> CopyState: ...
    def failure(self, copy: HostCopy) -> tuple[str, object]:
        """Of a failed copy: why, and its keepalive. Else ("", None)."""
    def take_released(self) -> list[object]:
        """Keepalives of sources that may be dropped on their owner streams, in order of release. Collects first."""
    def close(self) -> None:
        """Waits for all copies, then hands every reference back, and raises what the device said. Blocks."""

# Planning.

class Room(_Native):
    """Bytes for each interval of a step; may be negative."""

    def __init__(self, room_bytes: Sequence[int]) -> None: ...
    def take_down(self, wanted: Sequence[tuple[int, int, int]]) -> list[int]:
        """For each (highest, lowest, bytes) in turn: takes so much from the highest interval on, downwards as long as
        there is as much, at most to the lowest. The intervals below the last that it was taken from: the highest itself
        where that has not enough."""

class StepOutcome(_Native):
    """A step under a plan. An absence is (gap, release point, reload point or -1)."""

    @property
    def step_ns(self) -> int: ...
    @property
    def absences(self) -> list[tuple[int, int, int]]: ...
    @property
    def stalls(self) -> list[tuple[int, bool, int, list[int]]]:
        """(gap or -1, whether for a copy back, ns, gaps whose copies the engine did just before), in time order."""

class StepModel(_Native):
    """One recorded step, for the search of a plan: schedules and replays it. See vdnn.planning.step_model."""

    def __init__(
        self,
        *,
        compute_ns: Sequence[int],
        peak_bytes: Sequence[int],
        kinds: Sequence[int],
        storages_of_points: Sequence[int],
        storages: Sequence[tuple[int, int, int, int]],
        gaps: Sequence[tuple[int, int, int, int]],
        link: LinkModel,
    ) -> None: ...
    def evaluate(
        self,
        may_leave: bytes,
        budget_bytes: int,
        more_room: Sequence[tuple[int, int]] = [],
        in_order: bool = False,
        furthest_first: bool = False,
    ) -> StepOutcome | None:
        """`may_leave` has a byte for each gap. None: the budget cannot be met with these."""
    def replay(self, absences: Sequence[tuple[int, int, int]]) -> StepOutcome: ...
    def peak_bytes(self, absences: Sequence[tuple[int, int, int]]) -> int: ...

class RebuiltStep(_Native):
    """A step with what it rebuilds. `compute_ns` is that of every interval, `step_ns` their sum."""

    @property
    def step_ns(self) -> int: ...
    @property
    def peak_bytes(self) -> int:
        """With nothing moved."""
    @property
    def least_bytes(self) -> int:
        """With everything moved that can be."""
    @property
    def compute_ns(self) -> list[int]: ...
    @property
    def gaps(self) -> list[tuple[int, int, int, int, int, int]]:
        """(lifetime, bytes, release point, use or -1, first interval, last interval), as gaps_of() orders them."""
    def model(self, link: LinkModel) -> StepModel: ...

class RecordedStep(_Native):
    """A recording, for the search of what to rebuild. See vdnn.planning.rebuilding."""

    def __init__(
        self,
        *,
        compute_ns: Sequence[int],
        allocated_bytes: Sequence[int],
        peak_bytes: Sequence[int],
        kinds: Sequence[int],
        lifetimes_of_points: Sequence[int],
        storages: Sequence[tuple[int, int, int, int]],
        uses: Sequence[Sequence[int]],
        read: Sequence[Sequence[int]],
        rebuilds: Sequence[tuple[Sequence[int], int, int, int, int, int, int] | None],
    ) -> None:
        """Of a rebuild: (inputs, known point, compute ns, extra bytes, kept bytes, ns and bytes of giving up)."""
    def with_rebuilds(self, chosen: Sequence[int]) -> RebuiltStep: ...
