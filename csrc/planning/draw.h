// Random draws of a search: the same from the same seed on any machine, and the same as Python's `random.Random`.
//
// The readable form of the search (tests/planning/reference/search.py) draws with `random.Random`, and tests check that
// both find the same plans. Standard distributions differ between libraries, so none is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace vdnn {

class Draw {
 public:
  explicit Draw(std::uint32_t seed);

  [[nodiscard]] double share();                        // at least 0, less than 1
  [[nodiscard]] std::size_t below(std::size_t count);  // `count` is at least 1 and less than 2^32
  void shuffle(std::vector<std::int32_t>& items);
  // `count` different ones of the items, in a random order.
  [[nodiscard]] std::vector<std::int32_t> sample(std::vector<std::int32_t> items, std::size_t count);

 private:
  std::mt19937 words_;
};

}  // namespace vdnn
