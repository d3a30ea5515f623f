// ContentHash on the CPU. content_hash.h defines what it computes.

#include "codec/content_hash.h"

#include <cstring>

#include "codec/reference.h"

namespace vdnn {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read in memory order");

std::uint64_t term_at(const unsigned char* source, std::uint64_t index) noexcept {
  std::uint64_t word;
  std::memcpy(&word, source + index * sizeof(word), sizeof(word));
  return hash_term(word, index);
}

}  // namespace

void content_hash(const KernelCall& call) noexcept {
  const unsigned char* source = source_of(call);
  const std::uint64_t words = call.count / 8;
  std::uint64_t sum = hash_length_term(call.count);
  // Four terms per iteration: each is a chain of two products, and the processor runs four such chains at once.
  std::uint64_t index = 0;
  for (; index + 4 <= words; index += 4) {
    sum += (term_at(source, index) + term_at(source, index + 1)) +
           (term_at(source, index + 2) + term_at(source, index + 3));
  }
  for (; index < words; ++index) sum += term_at(source, index);
  if (const std::uint64_t tail_bytes = call.count % 8; tail_bytes != 0) {
    std::uint64_t word = 0;
    std::memcpy(&word, source + words * 8, tail_bytes);
    sum += hash_term(word, words);
  }
  std::memcpy(target_of(call), &sum, sizeof(sum));
}

}  // namespace vdnn
