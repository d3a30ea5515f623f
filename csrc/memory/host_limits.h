// The resources and limits of the host: memory, cgroup limits, locked-memory limit, NUMA nodes, huge pages.
//
// They are read from files only. `root` is "/" except in tests, which pass a directory tree of their own.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace vdnn {

struct HostLimits {
  std::uint64_t total_bytes = 0;
  std::uint64_t available_bytes = 0;
  // Of the cgroup (own or ancestor) with the least headroom: its limit, or where it is throttled if that is less.
  std::optional<std::uint64_t> cgroup_limit_bytes;
  std::optional<std::uint64_t> cgroup_used_bytes;  // of the same cgroup, without file pages that it could reclaim
  std::optional<std::uint64_t> memlock_limit_bytes;
  int numa_nodes = 1;
  std::uint64_t huge_page_bytes = 0;
  std::uint64_t huge_pages_free = 0;
  std::string transparent_huge_pages;  // "always", "madvise", "never", or "" if unknown
};

[[nodiscard]] HostLimits read_host_limits(const std::string& root = "/");

// The default cap of a pool: four fifths of the memory that is free now, by the tighter of machine and cgroup.
[[nodiscard]] std::uint64_t default_pinned_cap_bytes(const HostLimits& limits);

}  // namespace vdnn
