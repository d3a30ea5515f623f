// Names of enumerators, and device ids, for all devices.
#include "device/device.h"

#include <algorithm>
#include <atomic>
#include <new>

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

Stream Device::borrow_stream(std::string_view name) {
  if (!closed()) {
    const std::lock_guard<std::mutex> lock(idle_mutex_);
    const auto found =
        std::find_if(idle_.begin(), idle_.end(), [&](const IdleStream& one) { return one.name == name; });
    if (found != idle_.end()) {
      const Stream stream = found->stream;
      idle_.erase(found);
      return stream;
    }
  }
  return create_stream(name);
}

void Device::give_back(std::string_view name, Stream stream) noexcept {
  try {
    const std::lock_guard<std::mutex> lock(idle_mutex_);
    idle_.push_back({std::string(name), stream});
  } catch (const std::bad_alloc&) {
    return;  // the device keeps the stream until it is closed
  }
}

std::uint32_t next_device_id() noexcept {
  static std::atomic<std::uint32_t> last{0};
  return ++last;
}

}  // namespace vdnn
