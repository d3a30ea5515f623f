// PackBits and UnpackBits on the CPU: boolean masks with one bit per element.
//
// Bit i of byte b is element 8 * b + i, as in numpy.packbits(bitorder="little"). The bits after the last element are
// written as 0 and ignored when read, so equal masks have equal bytes.

#include <algorithm>
#include <cstring>

#include "codec/bit_bytes.h"
#include "codec/reference.h"

namespace vdnn {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "byte i of a word must be element i");

void pack_bits(const KernelCall& call) noexcept {
  const unsigned char* source = source_of(call);
  unsigned char* target = target_of(call);
  for (std::uint64_t first = 0; first < call.count; first += 8) {
    std::uint64_t word = 0;
    const std::uint64_t elements = std::min<std::uint64_t>(8, call.count - first);
    std::memcpy(&word, source + first, elements);
    target[first / 8] = gather_bits(word);
  }
}

void unpack_bits(const KernelCall& call) noexcept {
  const unsigned char* source = source_of(call);
  unsigned char* target = target_of(call);
  for (std::uint64_t first = 0; first < call.count; first += 8) {
    const std::uint64_t word = spread_bits(source[first / 8]);
    const std::uint64_t elements = std::min<std::uint64_t>(8, call.count - first);
    std::memcpy(target + first, &word, elements);
  }
}

}  // namespace vdnn
