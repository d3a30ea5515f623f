"""HardwareProfile: the figures of one card and its link to the host, each with its source.

Peaks are the vendor's figures for dense operations; the rates of the link are those that copies reach. This module
refuses a figure that is not a number above zero, a figure without a source, and figures that cannot be true together,
such as a link that is slower in both directions at once than in one, so that code that reads a profile need not check
again. profile_files.py reads profiles
from files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vdnn.errors import InvalidArgumentError
from vdnn.hardware.operation_classes import (
    BANDWIDTH_CLASSES,
    COMPUTE_CLASSES,
    FILLED_CLASSES,
    MOST_EFFICIENCY,
    TILED_CLASSES,
)

# The keys that flop_per_s may have. "tf32" is not a dtype of torch: it is how tensor cores multiply float32.
DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16")
WHOLE_FIGURES = (
    "memory_bytes",
    "memory_bytes_per_s",
    "to_host_bytes_per_s",
    "to_device_bytes_per_s",
    "duplex_bytes_per_s",
    "link_latency_ns",
    "kernel_launch_ns",
)
FRACTIONS = ("compute_efficiency", "bandwidth_efficiency")
# Figures by class of operation, which a profile may lack: see operation_classes.py.
BY_CLASS = ("efficiency", "fill_ns", "tile_overhead")
# Figures of the host that the card is in, which a profile may lack. Bytes and bytes per second, and a count of cores.
HOST_FIGURES = ("memory_bytes", "memory_bytes_per_s", "step_bytes_per_s", "cores")

# The times in which a usual host issues operations. A profile has all of these figures or none: see host_figures.py.
ISSUE_FIGURES = ("operation", "launch", "save", "copy", "recompute")

# The memory that libraries keep for the whole process, if the profile has it: cuBLAS's workspaces, which torch's
# allocator counts, and the context of CUDA with the code of its libraries, which it does not.
LIBRARY_FIGURES = ("cublas_bytes", "context_bytes")

# Figures of the link between cards, which a profile may lack: the rate at which one sends while it receives as much.
CARD_FIGURES = ("bytes_per_s",)


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """The figures of one card. `sources` maps each name in `figure_names` to the source of that figure.

    `memory_bytes` is the most that one program can allocate. `flop_per_s` and `memory_bytes_per_s` are peaks;
    `compute_efficiency` and `bandwidth_efficiency` are the fractions of them that a good kernel reaches.
    `duplex_bytes_per_s` is the sum of both directions of the link while both are busy. `efficiency` and `fill_ns` are
    by class of operation, as in "convolution.tf32": a fraction of the peak in place of those above, and the time in
    which a kernel fills and drains the card. By that time small operations lose efficiency. `tile_overhead` is by class
    too: how much longer the inner dimension of a product seems, because each tile of the result begins and ends.

    `host` has the figures of a usual host of the card: the `memory_bytes` of it, the rate `memory_bytes_per_s` that its
    memory reaches, and `step_bytes_per_s`, how much of that an optimizer's step on all of its `cores` uses alone.
    `cards` has `bytes_per_s`: the rate at which a card sends to others in collectives and receives as much.
    `libraries` has the bytes that they keep on the card: `cublas_bytes` and `context_bytes`.
    `workspaces` has the bytes that a library was measured to take for the time of one call, by the key of the call:
    see workspaces.py. `issue_ns` has the time in which the host issues an `operation`, a `launch` and so on: see
    HostFigures.
    """

    name: str
    description: str
    memory_bytes: int
    flop_per_s: Mapping[str, int] = field(hash=False)
    memory_bytes_per_s: int
    to_host_bytes_per_s: int
    to_device_bytes_per_s: int
    duplex_bytes_per_s: int
    link_latency_ns: int
    kernel_launch_ns: int
    compute_efficiency: float
    bandwidth_efficiency: float
    sources: Mapping[str, str] = field(hash=False, repr=False)
    efficiency: Mapping[str, float] = field(default_factory=dict, hash=False)
    fill_ns: Mapping[str, int] = field(default_factory=dict, hash=False)
    tile_overhead: Mapping[str, int] = field(default_factory=dict, hash=False)
    host: Mapping[str, int] = field(default_factory=dict, hash=False)
    cards: Mapping[str, int] = field(default_factory=dict, hash=False)
    issue_ns: Mapping[str, int] = field(default_factory=dict, hash=False)
    libraries: Mapping[str, int] = field(default_factory=dict, hash=False)
    workspaces: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for figure in WHOLE_FIGURES:
            self._check_whole(figure, getattr(self, figure))
        for figure in FRACTIONS:
            self._check_fraction(figure, getattr(self, figure))
        self._check_dtypes()
        self._check_classes()
        for figure, value in self.host.items():
            if figure not in HOST_FIGURES:
                raise self._refusal("host", f"figures among {', '.join(HOST_FIGURES)}", repr(figure))
            self._check_whole(f"host.{figure}", value)
        for figure, value in self.cards.items():
            if figure not in CARD_FIGURES:
                raise self._refusal("cards", f"figures among {', '.join(CARD_FIGURES)}", repr(figure))
            self._check_whole(f"cards.{figure}", value)
        for figure, value in self.libraries.items():
            if figure not in LIBRARY_FIGURES:
                raise self._refusal("libraries", f"figures among {', '.join(LIBRARY_FIGURES)}", repr(figure))
            self._check_whole(f"libraries.{figure}", value)
        if self.issue_ns and set(self.issue_ns) != set(ISSUE_FIGURES):
            raise self._refusal("issue_ns", f"all of {', '.join(ISSUE_FIGURES)}, or none", ", ".join(self.issue_ns))
        for figure, value in self.issue_ns.items():
            self._check_whole(f"issue_ns.{figure}", value)
        for figure in self.figure_names:
            if not self.sources.get(figure, "").strip():
                raise self._refusal(figure, "a source in words", "none")
        fastest = max(self.to_host_bytes_per_s, self.to_device_bytes_per_s)
        if self.duplex_bytes_per_s < fastest:
            expected = f"at least {fastest}, the rate of the faster direction alone"
            raise self._refusal("duplex_bytes_per_s", expected, str(self.duplex_bytes_per_s))
        self._check_possible(fastest)

    @property
    def figure_names(self) -> tuple[str, ...]:
        """The names of all figures. `source_of` takes any of them."""
        peaks = (f"flop_per_s.{dtype}" for dtype in self.flop_per_s)
        by_class = (f"{figure}.{key}" for figure in BY_CLASS for key in getattr(self, figure))
        of_host = (f"host.{figure}" for figure in self.host)
        of_cards = (f"cards.{figure}" for figure in self.cards)
        issued = (f"issue_ns.{figure}" for figure in self.issue_ns)
        kept = (f"libraries.{figure}" for figure in self.libraries)
        taken = (f"workspaces.{call}" for call in self.workspaces)
        return (*WHOLE_FIGURES, *FRACTIONS, *peaks, *by_class, *of_host, *of_cards, *issued, *kept, *taken)

    def source_of(self, figure: str) -> str:
        """The source of `figure`, as in source_of("memory_bytes") or source_of("flop_per_s.float32")."""
        if figure not in self.figure_names:
            raise self._refusal("source_of", f"one of {', '.join(self.figure_names)}", repr(figure))
        return self.sources[figure]

    def compute_efficiency_of(self, classes: Sequence[str], dtype: str) -> float:
        """The fraction of the peak that arithmetic in `dtype` reaches: the figure of the first class that has one."""
        found = (self.efficiency[f"{name}.{dtype}"] for name in classes if f"{name}.{dtype}" in self.efficiency)
        return next(found, self.compute_efficiency)

    def bandwidth_efficiency_of(self, operation: str) -> float:
        """The fraction of the memory's peak rate that a class of operations reaches."""
        return self.efficiency.get(operation, self.bandwidth_efficiency)

    def _check_dtypes(self) -> None:
        if "float32" not in self.flop_per_s:
            raise self._refusal("flop_per_s", "a figure for float32", f"{', '.join(self.flop_per_s) or 'none'}")
        for dtype, flop_per_s in self.flop_per_s.items():
            if dtype not in DTYPES:
                raise self._refusal("flop_per_s", f"dtypes among {', '.join(DTYPES)}", repr(dtype))
            self._check_whole(f"flop_per_s.{dtype}", flop_per_s)

    def _check_classes(self) -> None:
        for key, value in self.efficiency.items():
            if key in BANDWIDTH_CLASSES:
                self._check_fraction(f"efficiency.{key}", value)
            else:
                self._check_class("efficiency", key, COMPUTE_CLASSES)
                self._check_fraction(f"efficiency.{key}", value, most=MOST_EFFICIENCY)
        for figure, classes in (("fill_ns", FILLED_CLASSES), ("tile_overhead", TILED_CLASSES)):
            for key, value in getattr(self, figure).items():
                self._check_class(figure, key, classes)
                self._check_whole(f"{figure}.{key}", value)

    def _check_class(self, figure: str, key: str, classes: tuple[str, ...]) -> None:
        name, _, dtype = key.partition(".")
        if name not in classes or dtype not in self.flop_per_s:
            expected = f"a class and a dtype of flop_per_s, as in {classes[-1]}.float32, of {', '.join(classes)}"
            raise self._refusal(figure, expected, repr(key))

    def _check_possible(self, fastest: int) -> None:
        both = self.to_host_bytes_per_s + self.to_device_bytes_per_s
        if self.duplex_bytes_per_s > both:
            expected = f"at most {both}, both directions together"
            raise self._refusal("duplex_bytes_per_s", expected, str(self.duplex_bytes_per_s))
        if self.memory_bytes_per_s < fastest:
            expected = f"at least {fastest}, the rate of the link"
            raise self._refusal("memory_bytes_per_s", expected, str(self.memory_bytes_per_s))
        single, double = self.flop_per_s["float32"], self.flop_per_s.get("float64", 0)
        if double > single:
            raise self._refusal("flop_per_s.float64", f"at most {single}, the rate of float32", str(double))
        step, reached = self.host.get("step_bytes_per_s", 0), self.host.get("memory_bytes_per_s")
        if reached is not None and step > reached:
            raise self._refusal(
                "host.step_bytes_per_s", f"at most {reached}, what the host's memory reaches", str(step)
            )
        for figure, nbytes in self.libraries.items():
            if nbytes >= self.memory_bytes:
                expected = f"less than {self.memory_bytes}, the card's memory"
                raise self._refusal(f"libraries.{figure}", expected, str(nbytes))

        for call, taken in self.workspaces.items():
            self._check_taken(f"workspaces.{call}", taken)

    def _check_taken(self, figure: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self.memory_bytes:
            expected = f"a whole number from 0, and less than {self.memory_bytes}, the card's memory"
            raise self._refusal(figure, expected, repr(value))

    def _check_whole(self, figure: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._refusal(figure, "a whole number above zero", repr(value))

    def _check_fraction(self, figure: str, value: object, most: float = 1) -> None:
        # The comparison is false for NaN too, which is therefore refused.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
            raise self._refusal(figure, f"a fraction above 0 and at most {most:g}", repr(value))

    def _refusal(self, figure: str, expected: str, got: str) -> InvalidArgumentError:
        return InvalidArgumentError(argument=f"hardware profile {self.name!r}, {figure}", expected=expected, got=got)
