// The 64-bit content hash that integrity mode compares before a storage is offloaded and after it is reloaded.
//
// It is the sum, modulo 2^64, of one term per little-endian 8-byte word (the tail is padded with zeros) and one term
// for the length in bytes. Addition is commutative, so a GPU's blocks may add in any order and still agree with the
// CPU. Each term depends on the index of its word, so swapped words and shifted content change the hash; the length
// term distinguishes blocks of zeros of different lengths. The hash detects accidents, not forgery.
#pragma once

#include <cstdint>

#include "codec/host_device.h"

namespace vdnn {

// splitmix64's finalizer over word ^ key(index). It is a bijection of the word, so a change within one word always
// changes the hash. Without the first shift, a flipped top bit would pass the first product unmixed.
VDNN_HOST_DEVICE constexpr std::uint64_t hash_term(std::uint64_t word, std::uint64_t index) {
  std::uint64_t mixed = word ^ ((index + 1) * 0x9e3779b97f4a7c15);
  mixed = (mixed ^ (mixed >> 30U)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 27U)) * 0x94d049bb133111eb;
  return mixed ^ (mixed >> 31U);
}

// The term of the length. No buffer has a word with this index, so no word can be mistaken for the length.
VDNN_HOST_DEVICE constexpr std::uint64_t hash_length_term(std::uint64_t bytes) {
  return hash_term(bytes, std::uint64_t{1} << 63U);
}

}  // namespace vdnn
