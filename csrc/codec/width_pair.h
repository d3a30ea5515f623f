// A pair of integer widths as one number: a case of a switch over both.
#pragma once

#include <cstdint>

#include "codec/host_device.h"

namespace vdnn {

VDNN_HOST_DEVICE constexpr std::uint64_t width_pair(std::uint64_t source_width, std::uint64_t target_width) {
  return source_width * 16 + target_width;
}

}  // namespace vdnn
