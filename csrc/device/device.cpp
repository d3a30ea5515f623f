// Names of enumerators, and device ids, for all devices.
#include "device/device.h"

#include <atomic>

namespace vdnn {

const char* to_string(CopyDirection direction) noexcept {
  return direction == CopyDirection::DeviceToHost ? "device to host" : "host to device";
}

const char* to_string(Access access) noexcept {
  switch (access) {
    case Access::Read:
      return "read";
    case Access::Write:
      return "write";
    case Access::Release:
      return "release";
  }
  return "access";
}

std::uint32_t next_device_id() noexcept {
  static std::atomic<std::uint32_t> last{0};
  return ++last;
}

}  // namespace vdnn
