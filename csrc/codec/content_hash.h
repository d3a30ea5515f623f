// The 64-bit content hash: what integrity mode compares before a storage leaves and after it is back.
//
// The sum, modulo 2^64, of one term per little-endian 8-byte word (the tail padded with zeros) and of one term for
// the length in bytes. A sum has no order: a GPU's blocks add in any order and still agree with the CPU. The index
// goes into each term, so swapped words and shifted content differ; the length term tells zero blocks apart.
// It detects accidents, not forgery.
#pragma once

#include <cstdint>

#include "codec/host_device.h"

namespace vdnn {

// splitmix64's finalizer over word ^ key(index). It is a bijection of the word: a change within one word always
// changes the hash. The first shift matters: without it a flipped top bit would pass the first product unmixed.
VDNN_HOST_DEVICE constexpr std::uint64_t hash_term(std::uint64_t word, std::uint64_t index) {
  std::uint64_t mixed = word ^ ((index + 1) * 0x9e3779b97f4a7c15);
  mixed = (mixed ^ (mixed >> 30U)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 27U)) * 0x94d049bb133111eb;
  return mixed ^ (mixed >> 31U);
}

// The term of the length. No buffer has a word of this index, so no word can stand in for it.
VDNN_HOST_DEVICE constexpr std::uint64_t hash_length_term(std::uint64_t bytes) {
  return hash_term(bytes, std::uint64_t{1} << 63U);
}

}  // namespace vdnn
