"""Host limits read from made-up /proc and /sys trees: the tightest of machine, cgroup and its parents applies."""

from __future__ import annotations

from pathlib import Path

import pytest

from vdnn import _C

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    lines = ["MemTotal: 16384 kB", "MemAvailable: 8192 kB", "HugePages_Free: 3", "Hugepagesize: 2048 kB"]
    write(tmp_path / "proc/meminfo", "\n".join(lines))
    write(tmp_path / "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    for node in ("node0", "node1", "possible", "nodes"):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limits_of(root: Path) -> _C.HostLimits:
    return _C.host_limits(str(root))


def cgroup_v2(root: Path, group: str, limit: str, used: int, droppable: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / group
    write(folder / "memory.max", limit)
    write(folder / "memory.current", str(used))
    write(folder / "memory.stat", f"anon 1\ninactive_file {droppable}\n")


def test_the_machine_is_read(root: Path) -> None:
    limits = limits_of(root)
    assert limits.total_bytes == 16 * MIB
    assert limits.available_bytes == 8 * MIB
    assert limits.huge_page_bytes == 2 * MIB
    assert limits.huge_pages_free == 3
    assert limits.transparent_huge_pages == "madvise"
    assert limits.numa_nodes == 2
    assert limits.cgroup_limit_bytes is None


def test_a_version_2_cgroup_binds(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/user/job\n")
    cgroup_v2(root, "user/job", str(6 * MIB), 2 * MIB)
    limits = limits_of(root)
    assert limits.cgroup_limit_bytes == 6 * MIB
    assert limits.cgroup_used_bytes == 2 * MIB
    assert _C.default_pinned_cap_bytes(limits) == 4 * MIB // 5 * 4


def test_a_parents_tighter_cgroup_binds(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/user/job\n")
    cgroup_v2(root, "user/job", str(6 * MIB), 1 * MIB)
    cgroup_v2(root, "user", str(7 * MIB), 6 * MIB)
    limits = limits_of(root)
    assert limits.cgroup_limit_bytes == 7 * MIB
    assert limits.cgroup_used_bytes == 6 * MIB


def test_file_pages_that_can_be_dropped_do_not_count_as_used(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/job\n")
    cgroup_v2(root, "job", str(6 * MIB), 5 * MIB, droppable=3 * MIB)
    assert limits_of(root).cgroup_used_bytes == 2 * MIB


def test_a_cgroup_without_a_limit_does_not_bind(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/job\n")
    cgroup_v2(root, "job", "max", MIB)
    assert limits_of(root).cgroup_limit_bytes is None
    assert _C.default_pinned_cap_bytes(limits_of(root)) == 8 * MIB // 5 * 4


@pytest.mark.parametrize(("limit", "bound"), [("max", 3), (str(6 * MIB), 3), (str(2 * MIB), 2)])
def test_memory_beyond_which_a_cgroup_is_throttled_is_not_free(root: Path, limit: str, bound: int) -> None:
    """The kernel lets it allocate more, and stalls it to reclaim what pinned memory cannot give back."""
    write(root / "proc/self/cgroup", "0::/job\n")
    cgroup_v2(root, "job", limit, MIB)
    write(root / "sys/fs/cgroup/job/memory.high", str(3 * MIB))
    limits = limits_of(root)
    assert limits.cgroup_limit_bytes == bound * MIB
    assert _C.default_pinned_cap_bytes(limits) == (bound - 1) * MIB // 5 * 4


def test_a_version_1_cgroup_binds(root: Path) -> None:
    write(root / "proc/self/cgroup", "9:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    folder = root / "sys/fs/cgroup/memory/docker/abc"
    write(folder / "memory.limit_in_bytes", str(5 * MIB))
    write(folder / "memory.usage_in_bytes", str(3 * MIB))
    write(folder / "memory.stat", f"total_inactive_file {MIB}\n")
    limits = limits_of(root)
    assert limits.cgroup_limit_bytes == 5 * MIB
    assert limits.cgroup_used_bytes == 2 * MIB


def test_inside_a_container_the_mounted_root_binds(root: Path) -> None:
    """The path that /proc names is not visible in a container; the root of the mount is the container's own group."""
    write(root / "proc/self/cgroup", "4:memory:/docker/abc\n")
    write(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", str(5 * MIB))
    write(root / "sys/fs/cgroup/memory/memory.usage_in_bytes", str(MIB))
    assert limits_of(root).cgroup_limit_bytes == 5 * MIB


def test_version_1_writes_no_limit_as_a_huge_number(root: Path) -> None:
    write(root / "proc/self/cgroup", "4:memory:/\n")
    write(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    write(root / "sys/fs/cgroup/memory/memory.usage_in_bytes", str(MIB))
    assert limits_of(root).cgroup_limit_bytes is None


def test_an_overdrawn_cgroup_leaves_nothing(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/job\n")
    cgroup_v2(root, "job", str(MIB), 2 * MIB)
    assert _C.default_pinned_cap_bytes(limits_of(root)) == 0


def test_a_machine_without_these_files_is_no_error(tmp_path: Path) -> None:
    limits = limits_of(tmp_path)
    assert limits.total_bytes == 0
    assert limits.numa_nodes == 1
    assert limits.transparent_huge_pages == ""
