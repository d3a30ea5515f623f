// One call of a codec kernel as plain data: what a device is asked to launch.
//
// The same struct is the only parameter of every CUDA kernel and of its CPU reference, and it tells the ordering
// checker which bytes the kernel touches. It owns no memory. Device and host agree on its layout: all fields are 8
// bytes.
#pragma once

#include <cstdint>

namespace vdnn {

enum class Kernel : std::uint64_t {
  PackBits,     // count bytes (0 or not 0) -> count bits, little-endian within a byte, tail bits 0
  UnpackBits,   // count bits -> count bytes, each 0 or 1
  ContentHash,  // count bytes -> one 64-bit word (see content_hash.h)
};
inline constexpr std::uint64_t kernel_count = 3;

struct KernelCall {
  Kernel kernel = Kernel::PackBits;
  std::uint64_t source = 0;
  std::uint64_t target = 0;
  std::uint64_t count = 0;
};

}  // namespace vdnn
