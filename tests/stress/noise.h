// Content that can be recognised: any bytes written under one number differ from those written under another.
#pragma once

#include <cstdint>

#include "device/device.h"

namespace vdnn::stress {

inline constexpr std::uint64_t most_noise_bytes = 512 << 10;

void write_noise(Address address, std::uint64_t bytes, std::uint64_t content);
[[nodiscard]] bool is_noise(Address address, std::uint64_t bytes, std::uint64_t content);

}  // namespace vdnn::stress
