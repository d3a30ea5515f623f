// The options of a TransferQueue: the offload window, the batches, and whether copies are timed.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "device/errors.h"

namespace vdnn {

struct QueueOptions {
  std::uint64_t offload_window_bytes = std::uint64_t{512} << 20;  // sources held by copies in flight
  std::uint64_t small_copy_bytes = std::uint64_t{64} << 10;       // an offload of at most this size joins a batch
  std::uint64_t batch_bytes = std::uint64_t{1} << 20;
  Timing timing = Timing::Off;  // On: the start and the end of every copy are recorded
};

inline void require_window(std::uint64_t offload_bytes) {
  if (offload_bytes == 0) throw InvalidArgument("offload_window_bytes", "at least 1 byte", "0");
}

}  // namespace vdnn
