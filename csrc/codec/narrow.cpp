// NarrowIntegers and WidenIntegers on the CPU: between integers of 8, 16, 32 and 64 bits.
//
// Narrowing keeps the low bytes and asks nothing: that the values fit is known from shapes, before the call.

#include <cstring>

#include "codec/reference.h"
#include "codec/width_pair.h"

namespace vdnn {
namespace {

// Through memcpy, because neither side need be aligned to its width.
template <typename Source, typename Target>
void convert(const KernelCall& call) noexcept {
  const auto* __restrict source = source_of(call);
  auto* __restrict target = target_of(call);
  for (std::uint64_t i = 0; i < call.count; ++i) {
    Source value;
    std::memcpy(&value, source + i * sizeof(Source), sizeof(Source));
    const Target converted = static_cast<Target>(value);
    std::memcpy(target + i * sizeof(Target), &converted, sizeof(Target));
  }
}

}  // namespace

void narrow_integers(const KernelCall& call) noexcept {
  switch (width_pair(call.source_width, call.target_width)) {
    case width_pair(2, 1):
      return convert<std::uint16_t, std::uint8_t>(call);
    case width_pair(4, 1):
      return convert<std::uint32_t, std::uint8_t>(call);
    case width_pair(4, 2):
      return convert<std::uint32_t, std::uint16_t>(call);
    case width_pair(8, 1):
      return convert<std::uint64_t, std::uint8_t>(call);
    case width_pair(8, 2):
      return convert<std::uint64_t, std::uint16_t>(call);
    case width_pair(8, 4):
      return convert<std::uint64_t, std::uint32_t>(call);
    default:
      return;
  }
}

void widen_integers(const KernelCall& call) noexcept {
  switch (width_pair(call.source_width, call.target_width)) {
    case width_pair(1, 2):
      return convert<std::uint8_t, std::uint16_t>(call);
    case width_pair(1, 4):
      return convert<std::uint8_t, std::uint32_t>(call);
    case width_pair(2, 4):
      return convert<std::uint16_t, std::uint32_t>(call);
    case width_pair(1, 8):
      return convert<std::uint8_t, std::uint64_t>(call);
    case width_pair(2, 8):
      return convert<std::uint16_t, std::uint64_t>(call);
    case width_pair(4, 8):
      return convert<std::uint32_t, std::uint64_t>(call);
    default:
      return;
  }
}

}  // namespace vdnn
