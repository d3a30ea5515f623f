// mmap, mbind and madvise behind HostMapping.
#include "device/host_mapping.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "device/errors.h"

namespace vdnn {
namespace {

constexpr std::uint64_t huge_page_bytes = std::uint64_t{2} << 20;
constexpr int mpol_preferred = 1;  // from linux/mempolicy.h, a header that not every system has

void* map_aligned_to_huge_pages(std::uint64_t bytes, int protection, int flags) {
  // Map too much and trim, so that a mapping of several huge pages can use them from its first byte.
  const std::uint64_t padded = bytes + huge_page_bytes;
  void* raw = mmap(nullptr, padded, protection, flags, -1, 0);
  if (raw == MAP_FAILED) return raw;
  const auto start = reinterpret_cast<Address>(raw);
  const Address aligned = (start + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes;
  if (aligned > start) munmap(raw, aligned - start);
  const Address end = start + padded;
  if (end > aligned + bytes) munmap(reinterpret_cast<void*>(aligned + bytes), end - (aligned + bytes));
  return reinterpret_cast<void*>(aligned);
}

void advise(void* address, std::uint64_t bytes, int numa_node) {
  // All of these are hints: if the system refuses one, the pages still work, but are further away or smaller.
  if (numa_node >= 0 && numa_node < 64) {
    const unsigned long nodes = 1UL << numa_node;
    syscall(SYS_mbind, address, bytes, mpol_preferred, &nodes, sizeof(nodes) * 8, 0);
  }
  madvise(address, bytes, MADV_HUGEPAGE);
  madvise(address, bytes, MADV_DONTFORK);
}

}  // namespace

HostMapping HostMapping::map(std::uint64_t bytes, int numa_node, bool reserve_only) {
  const std::uint64_t page = host_page_bytes();
  if (bytes == 0 || bytes > (std::uint64_t{1} << 47)) {
    throw InvalidArgument("bytes", "between 1 byte and 128 TiB of host memory", std::to_string(bytes));
  }
  const std::uint64_t rounded = (bytes + page - 1) / page * page;
  const int protection = reserve_only ? PROT_NONE : PROT_READ | PROT_WRITE;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (reserve_only ? MAP_NORESERVE : 0);
  void* address = rounded >= 2 * huge_page_bytes ? map_aligned_to_huge_pages(rounded, protection, flags)
                                                 : mmap(nullptr, rounded, protection, flags, -1, 0);
  if (address == MAP_FAILED) {
    throw PinnedMemoryFull(rounded, 0, 0, std::string("mmap: ") + std::strerror(errno));
  }
  if (!reserve_only) advise(address, rounded, numa_node);
  HostMapping mapping;
  mapping.range_ = {reinterpret_cast<Address>(address), rounded};
  return mapping;
}

HostMapping::~HostMapping() {
  if (range_.bytes != 0) munmap(reinterpret_cast<void*>(range_.address), range_.bytes);
}

std::uint64_t host_page_bytes() noexcept {
  static const auto bytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace vdnn
