// What a TransferQueue may be told: its windows, its batches, and whether its copies are timed.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "device/errors.h"

namespace vdnn {

struct QueueOptions {
  std::uint64_t offload_window_bytes = std::uint64_t{512} << 20;  // sources held by copies in flight
  std::uint64_t reload_window_bytes = std::uint64_t{512} << 20;   // targets issued and not yet waited for
  std::uint64_t small_copy_bytes = std::uint64_t{64} << 10;       // up to here an offload joins a batch
  std::uint64_t batch_bytes = std::uint64_t{1} << 20;
  Timing timing = Timing::Off;  // On: every copy can be asked when it ran
};

inline void require_windows(std::uint64_t offload_bytes, std::uint64_t reload_bytes) {
  if (offload_bytes == 0) throw InvalidArgument("offload_window_bytes", "at least 1 byte", "0");
  if (reload_bytes == 0) throw InvalidArgument("reload_window_bytes", "at least 1 byte", "0");
}

}  // namespace vdnn
