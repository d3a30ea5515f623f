// Per-kernel facts that the host needs: the name, the byte counts and the reference.

#include "codec/codec.h"

#include "codec/bit_bytes.h"
#include "codec/reference.h"

namespace vdnn {
namespace {

constexpr std::uint64_t bytes_of_hash = 8;

}  // namespace

const char* kernel_symbol(Kernel kernel) noexcept {
  switch (kernel) {
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
  return call.kernel == Kernel::UnpackBits ? eighths(call.count) : call.count;
}

std::uint64_t target_bytes(const KernelCall& call) noexcept {
  if (call.kernel == Kernel::PackBits) return eighths(call.count);
  if (call.kernel == Kernel::ContentHash) return bytes_of_hash;
  return call.count;
}

void run_on_cpu(const KernelCall& call) noexcept {
  switch (call.kernel) {
    case Kernel::PackBits:
      return pack_bits(call);
    case Kernel::UnpackBits:
      return unpack_bits(call);
    case Kernel::ContentHash:
      return content_hash(call);
  }
}

}  // namespace vdnn
