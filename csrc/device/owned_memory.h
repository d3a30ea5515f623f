// The memory that a device has handed out, by address: who asks for a copy must name bytes that lie inside it.
//
// A copy from host memory that is not pinned would silently become synchronous on a GPU, so both devices check.
// Not synchronised: its device's lock guards it.
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
  // Throws InvalidArgument unless an address starts a mapping of this device (also after a first free).
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

// Device memory from allocate_device(): sizes by address.
class DeviceAllocations {
 public:
  void add(Address address, std::uint64_t bytes) { bytes_by_address_[address] = bytes; }
  void require(Address address) const;
  void remove(Address address) { bytes_by_address_.erase(address); }
  [[nodiscard]] std::vector<Address> addresses() const;

 private:
  std::map<Address, std::uint64_t> bytes_by_address_;
};

// Checks what can be checked of a copy or an allocation before it reaches hardware.
void require_copy_arguments(Address target, Address source, std::uint64_t bytes);
void require_allocation_bytes(std::uint64_t bytes);
// "0x7f... (+64 bytes)", for messages.
[[nodiscard]] std::string describe(ByteRange range);

}  // namespace vdnn
