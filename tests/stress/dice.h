// Chance from a seed: what a scenario draws depends on its seed alone, so a failing run can be repeated.
#pragma once

#include <cstdint>
#include <random>

namespace vdnn::stress {

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed) {}
  // One of 0 .. limit - 1.
  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }
  std::uint64_t between(std::uint64_t least, std::uint64_t most) { return least + below(most - least + 1); }
  bool percent(std::uint64_t chance) { return below(100) < chance; }
  // For dice of its own: threads do not share one.
  std::uint64_t seed() { return random_(); }

 private:
  std::mt19937_64 random_;
};

// What layers save: often next to nothing, sometimes just under or over a batch, up to half a MiB.
inline std::uint64_t draw_bytes(Dice& dice) {
  constexpr std::uint64_t most[] = {64, 4096, 64 << 10, 64 << 10, 512 << 10};
  return dice.between(1, most[dice.below(std::size(most))]);
}

}  // namespace vdnn::stress
