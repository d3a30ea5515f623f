"""Renders the Report as text for a terminal of 80 columns, and as JSON for programs.

The JSON object is {"format": FORMAT_VERSION, ...the fields of Report}. vdnn/doctor/facts.py documents the fields.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator

from vdnn.bytesize import format_bytes
from vdnn.doctor.facts import FORMAT_VERSION, GpuFacts, HostFacts, IssueFacts, Report
from vdnn.hardware import LinkFigures

_COLUMNS = 80
_LABEL = 14


def render_json(report: Report) -> str:
    """One JSON object, indented, with a final newline."""
    return json.dumps({"format": FORMAT_VERSION, **dataclasses.asdict(report)}, indent=2) + "\n"


def render_text(report: Report) -> str:
    """A few lines for each subject, then one sentence for each missing thing."""
    lines = [f"vdnn {report.vdnn_version}, Python {report.python_version}, {report.platform}", ""]
    for label, text in _rows(report):
        lines += _wrapped(label, text)
    lines.append("")
    if report.meanings:
        lines.append("What this means:")
        for meaning in report.meanings:
            lines += textwrap.wrap(meaning, _COLUMNS, initial_indent="- ", subsequent_indent="  ")
    else:
        lines.append("Nothing is missing.")
    return "\n".join(lines) + "\n"


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    extension, driver, torch = report.extension, report.driver, report.torch
    yield "extension", str(extension.path) if extension.present else f"missing: {extension.problem}"
    yield "torch", _torch_text(torch.version, torch.usable, torch.needed, torch.problem)
    if driver.loaded:
        found = f"CUDA {driver.version or 'of unknown version'}, GPUs: {driver.device_count}"
        yield "driver", f"{driver.library}, {found}" + (f" ({driver.problem})" if driver.problem else "")
    else:
        yield "driver", f"none: {driver.problem}"
    for gpu in report.gpus:
        yield from _gpu_rows(gpu)
    missing = {codec.reason for codec in report.codecs if not codec.available}
    available = [codec.kernel for codec in report.codecs if codec.available]
    if available:
        yield "codecs", ", ".join(available)
    for reason in sorted(str(reason) for reason in missing):
        names = [codec.kernel for codec in report.codecs if not codec.available and codec.reason == reason]
        yield "no codecs", f"{', '.join(names)}: {reason}"
    yield from _host_rows(report.host)
    yield from _issue_rows(report.issue)


def _torch_text(version: str | None, usable: bool, needed: str, problem: str | None) -> str:
    if version is None:
        return f"missing: {problem}"
    return version if usable else f"{version}, too old: {needed} is needed"


def _gpu_rows(gpu: GpuFacts) -> Iterator[tuple[str, str]]:
    label = f"GPU {gpu.ordinal}"
    if gpu.name is None or gpu.total_bytes is None:
        yield label, f"not usable: {gpu.problem}"
        return
    parts = [gpu.name, format_bytes(gpu.total_bytes)]
    if gpu.compute_capability is not None:
        parts.append(f"compute {gpu.compute_capability}")
    if gpu.pci_bus_id is not None:
        parts.append(f"PCI {gpu.pci_bus_id}")
    parts.append("NUMA node unknown" if gpu.numa_node is None else f"NUMA node {gpu.numa_node}")
    if gpu.integrated:
        parts.append("shares the host's memory")
    yield label, ", ".join(parts)
    if gpu.link is not None:
        yield from _link_rows(gpu.link)
    if gpu.problem is not None:
        yield "", gpu.problem


def _link_rows(link: LinkFigures) -> Iterator[tuple[str, str]]:
    yield "", f"to host     {_rate(link.to_host_bytes_per_s)}"
    yield "", f"to device   {_rate(link.to_device_bytes_per_s)}"
    yield "", f"both ways   {_rate(link.both_ways_bytes_per_s)} together"
    yield "", f"pinning     {format_bytes(link.block_bytes)} takes {link.pinning_ns / 1e6:.2f} ms"


def _rate(bytes_per_s: int) -> str:
    # Vendors and other tools state link rates in powers of ten.
    return f"{bytes_per_s / 1e9:6.2f} GB/s"


def _host_rows(host: HostFacts) -> Iterator[tuple[str, str]]:
    if host.problem is not None or host.total_bytes is None or host.available_bytes is None:
        yield "host", str(host.problem)
        return
    yield "host memory", f"{format_bytes(host.total_bytes)}, {format_bytes(host.available_bytes)} available"
    if host.cgroup_limit_bytes is None:
        yield "cgroup cap", "none"
    else:
        used = "" if host.cgroup_used_bytes is None else f", {format_bytes(host.cgroup_used_bytes)} used"
        yield "cgroup cap", format_bytes(host.cgroup_limit_bytes) + used
    limit = host.memlock_limit_bytes
    yield "locked memory", "no limit" if limit is None else f"at most {format_bytes(limit)}"
    yield "NUMA nodes", str(host.numa_nodes)
    reserved = f"{host.huge_pages_free} reserved and free"
    if host.huge_page_bytes:
        reserved += f", {format_bytes(host.huge_page_bytes)} each"
    yield "huge pages", f"transparent: {host.transparent_huge_pages or 'unknown'}; {reserved}"


def _issue_rows(issue: IssueFacts) -> Iterator[tuple[str, str]]:
    """The time of the host for each thing that it issues, here and beside the card of the profile."""
    host, profile = issue.measured, issue.of_profile
    if host is None:
        yield "issuing", str(issue.problem)
        return
    copies = None if profile is None else profile.copy_ns
    rows = (
        ("an operation", host.operation_ns, profile and profile.operation_ns),
        ("a launch", host.launch_ns, profile and profile.launch_ns),
        ("a save", host.save_ns, profile and profile.save_ns),
        ("a move out", host.move_out_ns, copies),
        ("a fetch", host.fetch_ns, copies),
        ("a recompute", host.recompute_ns, profile and profile.recompute_ns),
        ("an event", host.event_ns, None),
    )
    label = "issuing"
    for name, here_ns, there_ns in rows:
        here = "not measured: no GPU" if here_ns is None else f"{here_ns / 1e3:6.2f} us"
        yield label, f"{name:<13}{here}" + (f"  ({issue.profile}: {there_ns / 1e3:.2f} us)" if there_ns else "")
        label = ""


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=label.ljust(_LABEL),
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
