// Converts between eight bytes, held in one word, and the eight bits that they stand for.
//
// Byte i of the word corresponds to bit i of the byte (little-endian both ways). The reference and the kernels share
// these functions; the tests check both against formulas that use neither.
#pragma once

#include <cstdint>

#include "codec/host_device.h"

namespace vdnn {

// The number of bytes that hold `count` bits, or of words that hold `count` bytes. (count + 7) / 8 would wrap for the
// largest counts.
VDNN_HOST_DEVICE constexpr std::uint64_t eighths(std::uint64_t count) {
  return count / 8 + (count % 8 != 0 ? 1 : 0);
}

inline constexpr std::uint64_t low_bit_of_each_byte = 0x0101010101010101;

// Maps each nonzero byte to 1. Bit 7 of (low seven bits + 0x7f) is set if they are not 0, and nothing carries out.
VDNN_HOST_DEVICE constexpr std::uint64_t nonzero_bytes(std::uint64_t word) {
  const std::uint64_t low_seven_bits = 0x7f * low_bit_of_each_byte;
  return (((word & low_seven_bits) + low_seven_bits) | word) >> 7U & low_bit_of_each_byte;
}

// Bit i of the result is set if byte i is not 0. The multiplication moves bit 8i to bit 56 + i; no products overlap.
VDNN_HOST_DEVICE constexpr std::uint8_t gather_bits(std::uint64_t word) {
  return static_cast<std::uint8_t>(nonzero_bytes(word) * 0x0102040810204080 >> 56U);
}

// The inverse of gather_bits for bytes of 0 and 1: each byte gets a copy of `bits`, keeps bit i of it, and maps that to
// 0 or 1.
VDNN_HOST_DEVICE constexpr std::uint64_t spread_bits(std::uint8_t bits) {
  return nonzero_bytes(bits * low_bit_of_each_byte & 0x8040201008040201);
}

}  // namespace vdnn
