// What the host knows of every kernel: its name, how many bytes it touches, and its reference.

#include "codec/codec.h"

#include <limits>

#include "codec/bit_bytes.h"
#include "codec/reference.h"

namespace vdnn {
namespace {

constexpr std::uint64_t bytes_of_hash = 8;

// Saturates, so that check() sees an impossible range instead of a wrapped small one.
std::uint64_t saturating_product(std::uint64_t count, std::uint64_t width) noexcept {
  std::uint64_t product = 0;
  return __builtin_mul_overflow(count, width, &product) ? std::numeric_limits<std::uint64_t>::max() : product;
}

}  // namespace

const char* kernel_symbol(Kernel kernel) noexcept {
  switch (kernel) {
    case Kernel::NarrowIntegers:
      return "vdnn_narrow_integers";
    case Kernel::WidenIntegers:
      return "vdnn_widen_integers";
    case Kernel::PackBits:
      return "vdnn_pack_bits";
    case Kernel::UnpackBits:
      return "vdnn_unpack_bits";
    case Kernel::ContentHash:
      return "vdnn_content_hash";
  }
  return "";
}

std::uint64_t source_bytes(const KernelCall& call) noexcept {
  if (call.kernel == Kernel::UnpackBits) return eighths(call.count);
  return saturating_product(call.count, call.source_width);
}

std::uint64_t target_bytes(const KernelCall& call) noexcept {
  if (call.kernel == Kernel::PackBits) return eighths(call.count);
  if (call.kernel == Kernel::ContentHash) return bytes_of_hash;
  return saturating_product(call.count, call.target_width);
}

void run_on_cpu(const KernelCall& call) noexcept {
  switch (call.kernel) {
    case Kernel::NarrowIntegers:
      return narrow_integers(call);
    case Kernel::WidenIntegers:
      return widen_integers(call);
    case Kernel::PackBits:
      return pack_bits(call);
    case Kernel::UnpackBits:
      return unpack_bits(call);
    case Kernel::ContentHash:
      return content_hash(call);
  }
}

}  // namespace vdnn
