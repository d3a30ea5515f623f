// Range bookkeeping, and the heap behind cuMemAlloc.
#include "fake_memory.h"

#include <cstdlib>
#include <iterator>

#include "result_codes.h"

namespace vdnn::fake {

namespace {

constexpr std::size_t device_alignment = 256;  // what the driver promises

bool exceeds(std::uint64_t used, std::uint64_t bytes, std::uint64_t capacity) {
  return bytes > capacity || used > capacity - bytes;
}

}  // namespace

bool RangeTable::overlaps(std::uintptr_t address, std::size_t bytes) const {
  const auto after = ranges_.upper_bound(address);
  if (after != ranges_.end() && after->first - address < bytes) return true;
  if (after == ranges_.begin()) return false;
  const auto& [start, length] = *std::prev(after);
  return address - start < length;
}

bool RangeTable::contains(std::uintptr_t address, std::size_t bytes) const {
  const auto after = ranges_.upper_bound(address);
  if (after == ranges_.begin()) return false;
  const auto& [start, length] = *std::prev(after);
  const std::size_t offset = address - start;
  return offset <= length && bytes <= length - offset;
}

void RangeTable::add(std::uintptr_t address, std::size_t bytes) {
  ranges_.emplace(address, bytes);
  total_bytes_ += bytes;
}

bool RangeTable::remove(std::uintptr_t address) {
  const auto found = ranges_.find(address);
  if (found == ranges_.end()) return false;
  total_bytes_ -= found->second;
  ranges_.erase(found);
  return true;
}

driver::Result MemoryTable::allocate(driver::DevicePointer* address, std::size_t bytes) {
  if (address == nullptr || bytes == 0) return driver::invalid_value;
  if (exceeds(device_.total_bytes(), bytes, device_capacity_bytes_)) return driver::out_of_memory;
  void* memory = nullptr;
  if (posix_memalign(&memory, device_alignment, bytes) != 0) return driver::out_of_memory;
  *address = reinterpret_cast<std::uintptr_t>(memory);
  device_.add(*address, bytes);
  return driver::success;
}

void MemoryTable::release(driver::DevicePointer address) {
  std::free(reinterpret_cast<void*>(address));  // NOLINT(performance-no-int-to-ptr): device addresses are integers
}

driver::Result MemoryTable::register_host(std::uintptr_t address, std::size_t bytes) {
  if (address == 0 || bytes == 0 || bytes > UINTPTR_MAX - address) return driver::invalid_value;
  if (host_.overlaps(address, bytes)) return host_memory_already_registered;
  if (exceeds(host_.total_bytes(), bytes, host_capacity_bytes_)) return driver::out_of_memory;
  host_.add(address, bytes);
  return driver::success;
}

bool MemoryTable::accepts_host(std::uintptr_t address, std::size_t bytes) const {
  return bytes == 0 || host_.contains(address, bytes);
}

bool MemoryTable::accepts_device(driver::DevicePointer address, std::size_t bytes) const {
  if (bytes == 0) return true;
  if (address == 0 || bytes > UINTPTR_MAX - address) return false;
  return !device_.overlaps(address, bytes) || device_.contains(address, bytes);
}

void MemoryTable::reset_capacities() noexcept {
  device_capacity_bytes_ = default_device_capacity_bytes;
  host_capacity_bytes_ = UINT64_MAX;
}

}  // namespace vdnn::fake
