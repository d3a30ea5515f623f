// Seeds, numbers, orders and samples as CPython makes them (Modules/_randommodule.c, Lib/random.py; the generator is
// Matsumoto's and Nishimura's MT19937, and the seeding is its init_by_array).
#include "planning/draw.h"

#include <algorithm>
#include <unordered_set>

namespace vdnn {

namespace {

constexpr std::uint32_t first_state = 19650218;
constexpr std::size_t state_words = std::mt19937::state_size;

// The state that MT19937 has after init_by_array() with one key, as a standard seed sequence.
class KeyedState {
 public:
  using result_type = std::uint32_t;
  explicit KeyedState(std::uint32_t key) : key_(key) {}

  template <typename Iterator>
  void generate(Iterator begin, Iterator end) {
    std::vector<std::uint32_t> state(state_words);
    state[0] = first_state;
    for (std::size_t index = 1; index < state_words; ++index) {
      state[index] = 1812433253U * mixed(state[index - 1]) + static_cast<std::uint32_t>(index);
    }
    std::size_t at = 1;
    const auto step_on = [&] {
      if (++at < state_words) return;
      state[0] = state[state_words - 1];
      at = 1;
    };
    for (std::size_t count = 0; count < state_words; ++count) {
      state[at] = (state[at] ^ (mixed(state[at - 1]) * 1664525U)) + key_;
      step_on();
    }
    for (std::size_t count = 1; count < state_words; ++count) {
      state[at] = (state[at] ^ (mixed(state[at - 1]) * 1566083941U)) - static_cast<std::uint32_t>(at);
      step_on();
    }
    state[0] = 0x80000000U;
    std::copy_n(state.begin(), std::min<std::size_t>(state_words, static_cast<std::size_t>(end - begin)), begin);
  }

 private:
  static std::uint32_t mixed(std::uint32_t word) { return word ^ (word >> 30U); }
  std::uint32_t key_;
};

std::mt19937 seeded(std::uint32_t seed) {
  KeyedState state(seed);
  return std::mt19937(state);
}

}  // namespace

Draw::Draw(std::uint32_t seed) : words_(seeded(seed)) {}

double Draw::share() {
  const auto high = static_cast<double>(words_() >> 5U);  // 27 bits, and 26 below them
  const auto low = static_cast<double>(words_() >> 6U);
  return (high * 67108864.0 + low) / 9007199254740992.0;
}

std::size_t Draw::below(std::size_t count) {
  std::uint32_t bits = 0;
  while ((count >> bits) != 0) ++bits;
  std::size_t drawn = 0;
  do {
    drawn = words_() >> (32U - bits);
  } while (drawn >= count);
  return drawn;
}

void Draw::shuffle(std::vector<std::int32_t>& items) {
  for (std::size_t left = items.size(); left > 1; --left) std::swap(items[left - 1], items[below(left)]);
}

std::vector<std::int32_t> Draw::sample(std::vector<std::int32_t> items, std::size_t count) {
  std::size_t few = 21;  // up to so many items are drawn from what is left, of more each is drawn until it is a new one
  if (count > 5) {
    std::size_t power = 1;
    while (power < 3 * count) power *= 4;
    few += power;
  }
  std::vector<std::int32_t> drawn;
  drawn.reserve(count);
  if (items.size() <= few) {
    for (std::size_t left = items.size(); drawn.size() < count; --left) {
      const std::size_t one = below(left);
      drawn.push_back(items[one]);
      items[one] = items[left - 1];
    }
    return drawn;
  }
  std::unordered_set<std::size_t> taken;
  while (drawn.size() < count) {
    const std::size_t one = below(items.size());
    if (taken.insert(one).second) drawn.push_back(items[one]);
  }
  return drawn;
}

}  // namespace vdnn
