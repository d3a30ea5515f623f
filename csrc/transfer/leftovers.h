// What a queue that was dropped without close() leaves behind: everything that its copies may still touch.
//
// A destructor may not wait for copies, so this is parked; the next queue waits and takes the references.
#pragma once

#include <memory>
#include <vector>

#include "device/device.h"
#include "transfer/host_copy.h"

namespace vdnn {

struct Leftovers {
  std::shared_ptr<Device> device;
  Stream to_host;
  Stream to_device;
  std::vector<Keepalive> keepalives;
  std::vector<std::shared_ptr<PinnedBlock>> blocks;
  Leftovers* next_returned = nullptr;

  static void park(std::unique_ptr<Leftovers> leftovers) noexcept;
  // Waits for the copies of every parked queue and returns the references that nobody needs any more.
  [[nodiscard]] static std::vector<Keepalive> take_all();
};

}  // namespace vdnn
