// Reads /proc and /sys for HostLimits. A missing file leaves its fact unknown.
#include "memory/host_limits.h"

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace vdnn {
namespace {

namespace fs = std::filesystem;

// cgroup v1 reports "no limit" as the largest multiple of a page.
constexpr std::uint64_t beyond_any_machine = std::uint64_t{1} << 60;

std::optional<std::string> read_text(const fs::path& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::optional<std::uint64_t> read_number(const fs::path& path) {
  std::ifstream file(path);
  std::uint64_t number = 0;
  if (!(file >> number)) return std::nullopt;
  return number;
}

// Reads a number from "Name:  123 kB" lines of /proc/meminfo or "name 123" lines of memory.stat.
std::optional<std::uint64_t> field(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind(name, 0) != 0) continue;
    std::istringstream rest(line.substr(name.size()));
    std::uint64_t number = 0;
    if (rest >> number) return number;
  }
  return std::nullopt;
}

struct CgroupFiles {
  fs::path mount;
  const char* limit;
  // Beyond it the kernel stalls the group to reclaim memory, and pinned memory cannot be reclaimed. nullptr: none.
  const char* throttle;
  const char* used;
  const char* reclaimable;  // line of memory.stat
};

void tighten(HostLimits& limits, const fs::path& group, const CgroupFiles& files) {
  auto limit = read_number(group / files.limit);
  const auto throttle = files.throttle ? read_number(group / files.throttle) : std::nullopt;
  if (throttle && (!limit || *throttle < *limit)) limit = throttle;
  const auto used = read_number(group / files.used);
  if (!limit || !used || *limit >= beyond_any_machine) return;
  const std::uint64_t reclaimable = field(read_text(group / "memory.stat").value_or(""), files.reclaimable).value_or(0);
  const std::uint64_t held = *used - std::min(*used, reclaimable);
  const std::uint64_t headroom = *limit - std::min(*limit, held);
  if (limits.cgroup_limit_bytes) {
    const std::uint64_t known = *limits.cgroup_limit_bytes;
    if (known - std::min(known, *limits.cgroup_used_bytes) <= headroom) return;
  }
  limits.cgroup_limit_bytes = limit;
  limits.cgroup_used_bytes = held;
}

// The limits of all ancestors apply too.
void walk_up(HostLimits& limits, const std::string& group, const CgroupFiles& files) {
  fs::path relative = fs::path(group).relative_path();
  while (true) {
    tighten(limits, files.mount / relative, files);
    if (relative.empty()) return;
    relative = relative.parent_path();
  }
}

void read_cgroups(HostLimits& limits, const fs::path& root) {
  const CgroupFiles v2{root / "sys/fs/cgroup", "memory.max", "memory.high", "memory.current", "inactive_file "};
  const CgroupFiles v1{root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", nullptr, "memory.usage_in_bytes",
                       "total_inactive_file "};
  std::istringstream lines(read_text(root / "proc/self/cgroup").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") walk_up(limits, group, v2);
    if (controllers.find(",memory,") != std::string::npos) walk_up(limits, group, v1);
  }
}

void read_pages(HostLimits& limits, const fs::path& root) {
  const std::string info = read_text(root / "proc/meminfo").value_or("");
  const auto kib = [&](const char* name) { return field(info, name).value_or(0) * 1024; };
  limits.total_bytes = kib("MemTotal:");
  limits.available_bytes = kib("MemAvailable:");
  limits.huge_page_bytes = kib("Hugepagesize:");
  limits.huge_pages_free = field(info, "HugePages_Free:").value_or(0);
  const std::string setting = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled").value_or("");
  const std::size_t open = setting.find('[');
  const std::size_t close = setting.find(']');
  if (open != std::string::npos && close != std::string::npos) {
    limits.transparent_huge_pages = setting.substr(open + 1, close - open - 1);
  }
}

int count_numa_nodes(const fs::path& root) {
  int nodes = 0;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(root / "sys/devices/system/node", ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("node", 0) == 0 && name.find_first_not_of("0123456789", 4) == std::string::npos) ++nodes;
  }
  return std::max(nodes, 1);
}

}  // namespace

HostLimits read_host_limits(const std::string& root) {
  HostLimits limits;
  read_pages(limits, root);
  read_cgroups(limits, root);
  limits.numa_nodes = count_numa_nodes(root);
  rlimit locked{};
  if (getrlimit(RLIMIT_MEMLOCK, &locked) == 0 && locked.rlim_cur != RLIM_INFINITY) {
    limits.memlock_limit_bytes = locked.rlim_cur;
  }
  return limits;
}

std::uint64_t default_pinned_cap_bytes(const HostLimits& limits) {
  std::uint64_t free_bytes = limits.available_bytes;
  if (limits.cgroup_limit_bytes) {
    const std::uint64_t used = std::min(*limits.cgroup_limit_bytes, limits.cgroup_used_bytes.value_or(0));
    free_bytes = std::min(free_bytes, *limits.cgroup_limit_bytes - used);
  }
  return free_bytes / 5 * 4;
}

}  // namespace vdnn
