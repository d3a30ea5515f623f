// Bookkeeping of pinned mappings and device allocations, and the checks of a copy's arguments.
#include "device/owned_memory.h"

#include <cstdio>
#include <string>

#include "device/errors.h"

namespace vdnn {
namespace {

constexpr std::uint64_t largest_bytes = std::uint64_t{1} << 47;  // user address space of x86-64 and of most arm64

std::string hex(Address address) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

}  // namespace

std::string describe(ByteRange range) {
  return hex(range.address) + " (+" + std::to_string(range.bytes) + " bytes)";
}

void PinnedMappings::add(HostMapping mapping) {
  const Address address = mapping.range().address;
  by_address_.emplace(address, std::move(mapping));
}

ByteRange PinnedMappings::at(Address address) const {
  const auto found = by_address_.find(address);
  if (found == by_address_.end()) {
    throw InvalidArgument("address", "the start of pinned memory that this device allocated and has not freed",
                          hex(address));
  }
  return found->second.range();
}

void PinnedMappings::remove(Address address) {
  by_address_.erase(address);
}

void PinnedMappings::require_inside(ByteRange range) const {
  auto after = by_address_.upper_bound(range.address);
  if (after != by_address_.begin()) {
    const ByteRange mapping = std::prev(after)->second.range();
    if (range.address >= mapping.address && range.end() <= mapping.end()) return;
  }
  throw InvalidArgument("host range", "bytes inside one allocation pinned by this device", describe(range));
}

std::vector<Address> PinnedMappings::addresses() const {
  std::vector<Address> result;
  result.reserve(by_address_.size());
  for (const auto& [address, mapping] : by_address_) result.push_back(address);
  return result;
}

void PinnedMappings::abandon_all() noexcept {
  for (auto& [address, mapping] : by_address_) mapping.abandon();
}

void DeviceAllocations::require(Address address) const {
  if (bytes_by_address_.count(address) == 0) {
    throw InvalidArgument("address", "the start of device memory that this device allocated and has not freed",
                          hex(address));
  }
}

std::vector<Address> DeviceAllocations::addresses() const {
  std::vector<Address> result;
  result.reserve(bytes_by_address_.size());
  for (const auto& [address, bytes] : bytes_by_address_) result.push_back(address);
  return result;
}

void require_copy_arguments(Address target, Address source, std::uint64_t bytes) {
  if (bytes == 0) return;
  if (bytes > largest_bytes) {
    throw InvalidArgument("bytes", "a size that fits an address space (at most 128 TiB)", std::to_string(bytes));
  }
  if (target == 0) throw InvalidArgument("target", "an address", "null");
  if (source == 0) throw InvalidArgument("source", "an address", "null");
  if (target + bytes < target || source + bytes < source) {
    throw InvalidArgument("bytes", "a range that does not wrap around the address space", std::to_string(bytes));
  }
}

void require_allocation_bytes(std::uint64_t bytes) {
  if (bytes == 0 || bytes > largest_bytes) {
    throw InvalidArgument("bytes", "between 1 byte and 128 TiB", std::to_string(bytes));
  }
}

}  // namespace vdnn
