// One table of random bytes; a content number says where in it a buffer's bytes begin.
//
// Copied and compared whole, because byte by byte a sanitizer would spend its time here and not in the core.
#include "noise.h"

#include <cstring>
#include <random>
#include <vector>

namespace vdnn::stress {
namespace {

constexpr std::uint64_t offsets = 1 << 20;

const unsigned char* noise(std::uint64_t content) {
  static const std::vector<std::uint64_t> table = [] {
    std::vector<std::uint64_t> words((offsets + most_noise_bytes) / sizeof(std::uint64_t));
    std::mt19937_64 random(4057218);
    for (std::uint64_t& word : words) word = random();
    return words;
  }();
  return reinterpret_cast<const unsigned char*>(table.data()) + content % offsets;
}

}  // namespace

void write_noise(Address address, std::uint64_t bytes, std::uint64_t content) {
  std::memcpy(reinterpret_cast<void*>(address), noise(content), bytes);
}

bool is_noise(Address address, std::uint64_t bytes, std::uint64_t content) {
  return std::memcmp(reinterpret_cast<const void*>(address), noise(content), bytes) == 0;
}

}  // namespace vdnn::stress
