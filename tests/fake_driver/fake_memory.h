// Device memory from the host's heap, and the table of host ranges that are registered as pinned.
//
// CPU tensors stand in for device memory too, so an address that nobody allocated here is taken as theirs; one that
// was allocated here is held to its bounds. Guarded by the driver's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "device/cuda/driver_api.h"

namespace vdnn::fake {

// Disjoint byte ranges, by first address.
class RangeTable final {
 public:
  [[nodiscard]] bool overlaps(std::uintptr_t address, std::size_t bytes) const;
  // Wholly inside one range: neighbours that touch do not count as one.
  [[nodiscard]] bool contains(std::uintptr_t address, std::size_t bytes) const;
  void add(std::uintptr_t address, std::size_t bytes);
  bool remove(std::uintptr_t address);
  [[nodiscard]] std::uint64_t total_bytes() const noexcept { return total_bytes_; }
  [[nodiscard]] std::size_t size() const noexcept { return ranges_.size(); }

 private:
  std::map<std::uintptr_t, std::size_t> ranges_;
  std::uint64_t total_bytes_ = 0;
};

class MemoryTable final {
 public:
  [[nodiscard]] driver::Result allocate(driver::DevicePointer* address, std::size_t bytes);
  // False if it is no allocation. From then on the caller owns the memory; give it to release() once nothing uses it.
  [[nodiscard]] bool take(driver::DevicePointer address) { return device_.remove(address); }
  static void release(driver::DevicePointer address);
  [[nodiscard]] driver::Result register_host(std::uintptr_t address, std::size_t bytes);
  [[nodiscard]] bool unregister_host(std::uintptr_t address) { return host_.remove(address); }

  [[nodiscard]] bool accepts_host(std::uintptr_t address, std::size_t bytes) const;
  [[nodiscard]] bool accepts_device(driver::DevicePointer address, std::size_t bytes) const;

  void set_device_capacity(std::uint64_t bytes) noexcept { device_capacity_bytes_ = bytes; }
  void set_host_capacity(std::uint64_t bytes) noexcept { host_capacity_bytes_ = bytes; }
  void reset_capacities() noexcept;
  [[nodiscard]] std::uint64_t device_capacity_bytes() const noexcept { return device_capacity_bytes_; }
  [[nodiscard]] const RangeTable& device() const noexcept { return device_; }
  [[nodiscard]] const RangeTable& host() const noexcept { return host_; }

 private:
  static constexpr std::uint64_t default_device_capacity_bytes = std::uint64_t{64} << 30;

  RangeTable device_;
  RangeTable host_;
  std::uint64_t device_capacity_bytes_ = default_device_capacity_bytes;
  std::uint64_t host_capacity_bytes_ = UINT64_MAX;
};

}  // namespace vdnn::fake
