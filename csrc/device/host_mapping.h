// A range of anonymous host pages near a device, which the device then pins.
//
// Pages are bound to the device's NUMA node on systems with several, advised to be huge, and excluded from forked
// children (a child that wrote to them would make the kernel copy pages under a running DMA). Does not call the driver.
#pragma once

#include <cstdint>
#include <utility>

#include "device/device.h"

namespace vdnn {

class HostMapping {
 public:
  // Maps at least `bytes` (rounded up to pages). With `reserve_only` the range has addresses but no memory, for devices
  // that keep time without moving data. Throws PinnedMemoryFull if the system refuses.
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
  // Releases ownership without unmapping: for a forked child, or when the driver may still write to the pages.
  void abandon() noexcept { range_ = {}; }

 private:
  ByteRange range_;
};

// The page size of the host, which is the unit of pinning.
[[nodiscard]] std::uint64_t host_page_bytes() noexcept;

}  // namespace vdnn
