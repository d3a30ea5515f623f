// The memory that running copies may still access after their queue was destroyed without close().
//
// A destructor must not wait for copies, so it parks these references; take_all() waits for the copies.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "device/device.h"
#include "transfer/host_copy.h"

namespace vdnn {

struct Leftovers {
  // The names of the streams of a queue.
  static constexpr std::string_view kToHost = "vdnn offload";
  static constexpr std::string_view kToDevice = "vdnn reload";

  std::shared_ptr<Device> device;
  Stream to_host;
  Stream to_device;
  std::vector<Keepalive> keepalives;
  std::vector<std::shared_ptr<PinnedBlock>> blocks;
  Leftovers* next_returned = nullptr;

  // Waits for the copies of every parked queue and returns the references that are no longer needed.
  [[nodiscard]] static std::vector<Keepalive> take_all();
};

}  // namespace vdnn
