// Eight bytes as one word, and the eight bits that they stand for.
//
// Byte i of the word and bit i of the byte belong together (little-endian both ways). Shared by the reference and
// the kernels; the tests check both against formulas that use neither.
#pragma once

#include <cstdint>

#include "codec/host_device.h"

namespace vdnn {

// Bytes that hold `count` bits, or words that hold `count` bytes. Not (count + 7) / 8: that wraps for the largest
// counts.
VDNN_HOST_DEVICE constexpr std::uint64_t eighths(std::uint64_t count) {
  return count / 8 + (count % 8 != 0 ? 1 : 0);
}

inline constexpr std::uint64_t low_bit_of_each_byte = 0x0101010101010101;

// Each byte: 1 where it was not 0. Bit 7 of (low seven bits + 0x7f) says whether they are 0, without a carry out.
VDNN_HOST_DEVICE constexpr std::uint64_t nonzero_bytes(std::uint64_t word) {
  const std::uint64_t low_seven_bits = 0x7f * low_bit_of_each_byte;
  return (((word & low_seven_bits) + low_seven_bits) | word) >> 7U & low_bit_of_each_byte;
}

// Bit i is set where byte i is not 0. The multiplication moves bit 8i to bit 56 + i; no two products meet.
VDNN_HOST_DEVICE constexpr std::uint8_t gather_bits(std::uint64_t word) {
  return static_cast<std::uint8_t>(nonzero_bytes(word) * 0x0102040810204080 >> 56U);
}

// The inverse on bytes of 0 and 1: byte i keeps only bit i of its copy, which is then made 0 or 1.
VDNN_HOST_DEVICE constexpr std::uint64_t spread_bits(std::uint8_t bits) {
  return nonzero_bytes(bits * low_bit_of_each_byte & 0x8040201008040201);
}

}  // namespace vdnn
