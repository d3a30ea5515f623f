// The memory that a device has allocated, by address, and checks that the arguments of a copy lie inside it.
//
// On a GPU, a copy from host memory that is not pinned would silently become synchronous, so both devices check.
// Not synchronized: the device's lock guards it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/host_mapping.h"

namespace vdnn {

class PinnedMappings {
 public:
  void add(HostMapping mapping);
  // Throws InvalidArgument unless `address` is the start of a mapping that this device has not freed.
  [[nodiscard]] ByteRange at(Address address) const;
  // Unmaps; the pages must no longer be pinned.
  void remove(Address address);
  // Throws InvalidArgument unless `range` lies wholly inside one mapping.
  void require_inside(ByteRange range) const;
  [[nodiscard]] std::vector<Address> addresses() const;
  void abandon_all() noexcept;

 private:
  std::map<Address, HostMapping> by_address_;
};

// The sizes of device memory from allocate_device(), by address.
class DeviceAllocations {
 public:
  void add(Address address, std::uint64_t bytes) { bytes_by_address_[address] = bytes; }
  void require(Address address) const;
  void remove(Address address) { bytes_by_address_.erase(address); }
  [[nodiscard]] std::vector<Address> addresses() const;

 private:
  std::map<Address, std::uint64_t> bytes_by_address_;
};

// Check the arguments of a copy or an allocation before the call reaches hardware. Throw InvalidArgument.
void require_copy_arguments(Address target, Address source, std::uint64_t bytes);
void require_allocation_bytes(std::uint64_t bytes);
// "0x7f... (+64 bytes)", for messages.
[[nodiscard]] std::string describe(ByteRange range);

}  // namespace vdnn
