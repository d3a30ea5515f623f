// One call of a codec kernel, as plain data: what a device is asked to launch.
//
// The same struct is the one parameter of every CUDA kernel, of its CPU reference and of the checker's question
// "which bytes does it touch?". No pointers are owned; device and host agree on the layout (all fields 8 bytes).
#pragma once

#include <cstdint>

namespace vdnn {

enum class Kernel : std::uint64_t {
  NarrowIntegers,  // count integers of source_width bytes -> the low target_width bytes of each
  WidenIntegers,   // count unsigned integers of source_width bytes -> zero-extended to target_width bytes
  PackBits,        // count bytes (0 or not 0) -> count bits, little-endian within a byte, tail bits 0
  UnpackBits,      // count bits -> count bytes, each 0 or 1
  ContentHash,     // count bytes -> one 64-bit word (see content_hash.h)
};
inline constexpr std::uint64_t kernel_count = 5;

struct KernelCall {
  Kernel kernel = Kernel::NarrowIntegers;
  std::uint64_t source = 0;
  std::uint64_t target = 0;
  std::uint64_t count = 0;
  std::uint64_t source_width = 1;
  std::uint64_t target_width = 1;
};

}  // namespace vdnn
