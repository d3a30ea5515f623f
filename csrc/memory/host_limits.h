// What the host has and allows: memory, cgroup caps, locked-memory limit, NUMA nodes, huge pages.
//
// Read from files alone; `root` is "/" except in tests, which bring a tree of their own.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace vdnn {

struct HostLimits {
  std::uint64_t total_bytes = 0;
  std::uint64_t available_bytes = 0;
  std::optional<std::uint64_t> cgroup_limit_bytes;  // of the cgroup, its own or a parent's, with the least headroom
  std::optional<std::uint64_t> cgroup_used_bytes;   // of the same one, without file pages it could drop
  std::optional<std::uint64_t> memlock_limit_bytes;
  int numa_nodes = 1;
  std::uint64_t huge_page_bytes = 0;
  std::uint64_t huge_pages_free = 0;
  std::string transparent_huge_pages;  // "always", "madvise", "never" or "" where unknown
};

[[nodiscard]] HostLimits read_host_limits(const std::string& root = "/");

// What may be pinned when nobody says: four fifths of what is free now, by the tighter of machine and cgroup.
[[nodiscard]] std::uint64_t default_pinned_cap_bytes(const HostLimits& limits);

}  // namespace vdnn
