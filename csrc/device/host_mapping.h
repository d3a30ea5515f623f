// A range of anonymous host pages, placed near a device: what gets pinned.
//
// Pages are bound to the device's NUMA node where the system has several, asked to be huge, and kept out of forked
// children (a child that wrote to them would make the kernel copy pages under a running DMA). No driver is called.
#pragma once

#include <cstdint>
#include <utility>

#include "device/device.h"

namespace vdnn {

class HostMapping {
 public:
  // Maps at least `bytes` (rounded up to pages). With `reserve_only` the range has addresses but no memory, for
  // devices that keep time without moving data. Throws PinnedMemoryFull when the system refuses.
  [[nodiscard]] static HostMapping map(std::uint64_t bytes, int numa_node, bool reserve_only = false);

  HostMapping() = default;
  HostMapping(HostMapping&& other) noexcept : range_(std::exchange(other.range_, {})) {}
  HostMapping& operator=(HostMapping&& other) noexcept {
    std::swap(range_, other.range_);
    return *this;
  }
  HostMapping(const HostMapping&) = delete;  // one owner unmaps
  HostMapping& operator=(const HostMapping&) = delete;
  ~HostMapping();

  [[nodiscard]] ByteRange range() const noexcept { return range_; }
  // Gives up ownership without unmapping: in a forked child, or when the driver may still write to the pages.
  void abandon() noexcept { range_ = {}; }

 private:
  ByteRange range_;
};

// The unit in which the system pins.
[[nodiscard]] std::uint64_t host_page_bytes() noexcept;

}  // namespace vdnn
